"""Captions and definitions: the page's fixed wording."""

DEFINITIONS = (
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
