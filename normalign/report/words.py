"""Captions and definitions: the page's fixed wording."""

TERMS = (
    "T: mean L2 norm of the non-zero rows of the language model's input embedding; the norm an aligner aims for.",
    "k: mean norm of the visual tokens divided by the mean norm of the text tokens where the two meet. 1 is balance.",
    "Cosine: similarity of a token's state before and after a layer. Near 1 the layer hardly turns the "
    "token, near 0 "
    "it replaces its direction.",
    "Inertia: visual tokens of large norm keep their direction from layer to layer (cosine near 1) while text turns.",
    "Overwriting: the opposite; visual tokens of small norm lose their direction in the first layer (cosine near 0).",
    "Sync gap: mean over layers of the distance between the visual and the text cosine. 0 means that both turn alike.",
    "Relative update: length of what a layer's attention or MLP adds, divided by the length of the state it adds to.",
    "Sinks: tokens whose norm lies far outside the others' (language model: above 10 × the layer's "
    "median). They "
    "dominate means, therefore medians are drawn and means are also given without them.",
    "Effective rank: exponential of the entropy of the normalised singular values of a modality's "
    "tokens, over equal "
    "numbers of tokens per modality.",
)
DEFINITIONS = (
    *TERMS,
    "Gain, GWC: the aligner is a LayerNorm with gain g; Global Weight Compensation divides the gradient "
    "that passes "
    "back through it by mean |g|. AdamW cancels a constant gradient scale, so GWC acts through clipping "
    "and the like.",
    "± se: standard error. Shuffled images: the same questions with another item's image, the control "
    "for answers "
    "that do not need the image.",
)

CURVES_CAPTION = (
    "Median norm of the residual stream (0: where image and text meet) and cosine between a layer's "
    "input and output. "
    "Solid: visual tokens, dashed: text tokens. Visual curves far above the text's and cosines near 1 "
    "are inertia."
)
UPDATES_CAPTION = "Length of what attention and MLP add, relative to the state they add to."
RANK_CAPTION = "How many directions the tokens of a modality use, over equal numbers of tokens."
MASS_CAPTION = "Share of the text tokens' attention that falls on visual tokens, mean over heads and text tokens."
TRAINING_CAPTION = "Pale: every step; strong: mean over the last 5 % of the steps. Clip factor 1 means no clipping."
GRADIENTS_CAPTION = "Before clipping, log scale. None in this stage: the module is frozen there, or no variant has one."
SHARES_CAPTION = (
    "Share of the squared gradient norm, which is what clipping by global norm spends on a module. Under AdamW a "
    "constant factor on a gradient cancels, so gradient compensation acts mainly here: it takes budget from the others."
)
STEPS_CAPTION = "L2 norm of a step over that of the weights, log scale, measured every tenth step."
GAIN_CAPTION = "Only variants with a LayerNorm aligner have a gain."
MAPS_CAPTION = (
    "Attention of the position that answers to the visual tokens, drawn over the image, in the layer (counted from 1) "
    "where it looks at the image most. Dark to bright: little to much; every map is scaled to its own maximum, so "
    "compare shapes, not brightness."
)

DOCTOR_TERMS = (
    "Severity: of the norm imbalance. Strong if the ratio to T is at least 10 (or at most 1/10) and the first-8 sync "
    "gap at least 1/8, as much as one layer of eight in which one modality is replaced and the other left untouched. "
    "Mild if the ratio is at least 2 and the gap at least 1/16, if only the ratio is strong, or if tokens are "
    "overwritten.",
    "Predicted angle: by how much visual tokens would turn if a layer gave them the update C, at the angle θ, that it "
    "gives text tokens: tan of it is C sin θ / (‖h‖ + C cos θ). The distance to the measured angle tests the paper's "
    "assumptions of uniform magnitude and consistent geometry.",
    "ρ: mean cosine between what turns a visual and what turns a text token in the same layer, over all pairs, "
    "related or not, for which pairs are related is not known. What all pairs share raises the scores of unrelated "
    "pairs just as much; whether related pairs stand out rests on what they share beyond it, and that is not measured. "
    "Over several layers: the mean, each weighing as the squared length of what turns its text tokens.",
    "ρ*: above it, norm imbalance lowers the expected attention score of related pairs, as the paper says; below it, "
    "it raises the score, because a token that hardly turns keeps the alignment it came with.",
)
ANGLES_CAPTION = (
    "Left: by how much visual tokens turn in each layer (solid), and by how much they would if they got the text "
    "tokens' updates (dashed). Right: correlation ρ of the updates of visual and text tokens."
)
INEQUALITY_CAPTION = (
    "What the theory expects of the first layers, given how text tokens move through them. Left: the threshold ρ* for "
    "related pairs whose cosine at the merge is 0.6 (solid) or 0.2 (dashed), which is assumed, not measured; a model's "
    "mark above its curve means that the paper's inequality holds there. Right: expected attention score of a pair of "
    "cosine 0.6 behind these layers at the measured ρ; scores of pairs that share nothing have standard deviation 1. "
    "The mark is the model."
)
ROUTING_CAPTION = (
    "Entropy in nats of the router's softmax (mean over tokens) and of the experts' shares of all choices. A collapse "
    "shows in the second."
)
