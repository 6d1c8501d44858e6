"""Which of a checkpoint's tensors is the text embedding: by name, and where that leaves a choice by shape."""

import re
from collections.abc import Callable, Collection, Iterator

from normalign.embeddings.config import TextConfig

# Modules that hold a language model's input embedding, as families name them; the others may hold something else.
_TEXT = re.compile(
    "embed_tokens|wte|word_embeddings?|tok_embeddings|token_embeddings?|tokens_embed|token_embd|embed_in"
    "|text_embed_tokens|text_token_embedding|shared"
)
_OTHER = re.compile("embeddings?|embed|embd|emb")
_HEAD = re.compile("lm_head")
# Words in a tensor's path that say it embeds something else than text (Ovis' visual table, positions, sounds).
_NOT_TEXT = re.compile(
    r"(?:^|[._])(?:vision|visual|images?|img|vit|vte|vpm|video|audio|speech|sam|patch|pos|positions?|positional|type"
    r"|query|qformer|resampler|quantize|vq|vqmodel|vqvae|codebook|gen|talker|time|tile)(?:[._]|$)",
    re.IGNORECASE,
)
_COPY = re.compile(r"(^|\.)(layers\.\d+|mtp\w*)\.")  # multi-token prediction keeps a copy of the embedding
Shape = tuple[int, ...]
Fits = Callable[[Shape], bool]


def choose(names: Collection[str], shape_of: Callable[[str], Shape], config: TextConfig) -> str:
    """The text embedding's name. ``shape_of`` (rows, D) is asked about few of ``names``.

    Names count first; among names that say as much, or that say little, the sizes in the configuration do.

    Raises:
        ValueError: none, or several that nothing tells apart; the message names them.
    """
    for tier, fits in _tiers(names, config):
        found = {name: shape for name in tier if fits(shape := shape_of(name))}
        if found:
            name = _preferred(found, config)
            if _HEAD.fullmatch(_module(name)) and config.tied is False:
                raise ValueError(f"there is {name} but no text embedding, and by config.json the two are not tied")
            return name
    if stored := _quantised(names):
        raise ValueError(f"the text embedding is stored quantised ({', '.join(stored)}); give the unquantised model")
    raise ValueError("no tensor is named like a text embedding (embed_tokens, wte, word_embeddings, ...)")


def _tiers(names: Collection[str], config: TextConfig) -> Iterator[tuple[list[str], Fits]]:
    """Names that may be the text embedding's, the most telling first, and the shapes with which they are."""

    def whole(shape: Shape) -> bool:
        return shape == (config.vocabulary, config.width)

    def any_shape(shape: Shape) -> bool:
        return True

    def wide(shape: Shape) -> bool:
        return len(shape) == 2 and shape[0] >= (config.vocabulary or 0) and config.width in (None, shape[1])

    weights = [name for name in sorted(names) if _module(name)]
    text = [name for name in weights if not _NOT_TEXT.search(name)]
    yield [name for name in text if _TEXT.fullmatch(_module(name))], any_shape
    yield [name for name in text if _OTHER.fullmatch(_module(name))], wide
    yield [name for name in text if "emb" in _module(name)], whole
    if not _quantised(names):  # a tied model may be stored with its output matrix alone
        yield [name for name in text if _HEAD.fullmatch(_module(name))], any_shape
    yield [name for name in weights if _TEXT.fullmatch(_module(name))], whole


def _preferred(found: dict[str, Shape], config: TextConfig) -> str:
    preferences: tuple[Callable[[str], bool], ...] = (
        lambda name: found[name] == (config.vocabulary, config.width),
        lambda name: found[name][1:] == (config.width,) and found[name][0] >= (config.vocabulary or 0),
        lambda name: found[name][1:] == (config.width,),
        lambda name: not _COPY.search(name),
        lambda name: _module(name) == "shared",  # the one that encoder and decoder tie
    )
    left = list(found)
    for preferred in preferences:
        if len(left) > 1:
            left = [name for name in left if preferred(name)] or left
    if len(left) > 1:
        raise ValueError(
            f"any of {', '.join(left)} may be the text embedding, and vocab_size and hidden_size in config.json do "
            "not decide which"
        )
    return left[0]


def _quantised(names: Collection[str]) -> list[str]:
    """Tensors by which some format stores a text embedding in fewer bits (``embed_tokens.qweight``)."""
    parts = (name for name in names if not _module(name) and not _NOT_TEXT.search(name))
    return sorted(name for name in parts if any(_TEXT.fullmatch(word) for word in name.split(".")))


def with_extension(name: str, names: Collection[str]) -> list[str]:
    """``name`` and the tensor of added tokens' rows that some families keep beside it (Molmo, Idefics)."""
    stem = name.rpartition(".")[0]
    extensions = (f"{stem}.new_embedding", f"{stem}.additional_embedding.weight")
    return [name, *(extension for extension in extensions if extension in names)]


def _module(name: str) -> str:
    """Name of the module whose weight this is; empty if it is anything else."""
    *path, leaf = name.split(".")
    return path[-1] if path and (leaf == "weight" or (leaf == "embedding" and path[-1] == "wte")) else ""
