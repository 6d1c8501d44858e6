"""DINOv2 out of an ONNX graph that torch exported, as ``transformers.Dinov2Model``.

The exporter keeps the name of a weight that a node reads as it is, folds the transpose of every Linear into
an anonymous constant, and splits the position table in two; the paths of the nodes tell where those belong.
"""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch
    from onnx import ModelProto
    from transformers import Dinov2Config

BACKBONE = "backbone."
IMAGENET_MEAN = [0.485, 0.456, 0.406]
IMAGENET_STD = [0.229, 0.224, 0.225]
HEAD_WIDTH = 64  # of every published DINOv2; the graph does not name it


def convert(onnx_file: Path, out: Path) -> None:
    """Write the DINOv2 in ``onnx_file`` to ``out``: float32 safetensors, configuration, image processor.

    Raises:
        ValueError: the graph lacks a tensor that tells the configuration.
    """
    from safetensors.torch import save_file
    from transformers import BitImageProcessor

    state = read_state(onnx_file)
    try:
        config = config_of(state)
    except KeyError as error:
        raise ValueError(f"{onnx_file.name}: no tensor for {error.args[0]}; is it a DINOv2?") from None
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(out)
    side = cast(int, config.image_size)
    BitImageProcessor(
        size={"height": side, "width": side},
        do_center_crop=False,
        image_mean=IMAGENET_MEAN,
        image_std=IMAGENET_STD,
    ).save_pretrained(out)


def read_state(onnx_file: Path) -> dict[str, "torch.Tensor"]:
    """Tensors of the graph's ``backbone`` under the names of a ``Dinov2Model`` checkpoint without mask token."""
    import onnx
    import torch
    from onnx import numpy_helper

    graph = onnx.load(onnx_file)
    arrays = {tensor.name: tensor for tensor in graph.graph.initializer}
    state = {
        name.removeprefix(BACKBONE): torch.from_numpy(numpy_helper.to_array(tensor).copy())
        for name, tensor in arrays.items()
        if name.startswith(BACKBONE)
    }
    positions: dict[str, torch.Tensor] = {}
    for name, constant in _anonymous_constants(graph):
        value = torch.from_numpy(numpy_helper.to_array(arrays[constant]).copy())
        if name.endswith(".MatMul"):
            state[name.removesuffix(".MatMul") + ".weight"] = value.T.contiguous()
        else:
            positions[name] = value
    try:
        class_position = next(v for n, v in positions.items() if n.startswith("embeddings.Concat"))
        patch_positions = next(v for n, v in positions.items() if n.startswith("embeddings.Reshape"))
    except StopIteration:
        raise ValueError(f"{onnx_file}: the graph has no position table under /backbone/embeddings/") from None
    state["embeddings.position_embeddings"] = torch.cat([class_position, patch_positions], dim=1)
    return state


def _anonymous_constants(graph: "ModelProto") -> list[tuple[str, str]]:
    """(dotted path in the backbone, initializer) of every backbone node that reads an anonymous constant."""
    arrays = {tensor.name for tensor in graph.graph.initializer}
    return [
        (node.name.strip("/").replace("/", ".").removeprefix(BACKBONE), constant)
        for node in graph.graph.node
        if node.name.startswith("/backbone/")
        for constant in node.input
        if constant in arrays and "::" in constant
    ]


def config_of(state: dict[str, "torch.Tensor"]) -> "Dinov2Config":
    """The configuration that the shapes in ``state`` imply; the position grid gives ``image_size``."""
    from transformers import Dinov2Config

    width, channels, patch, _ = state["embeddings.patch_embeddings.projection.weight"].shape
    layers = {match[1] for name in state if (match := re.match(r"encoder\.layer\.(\d+)\.", name))}
    grid = math.isqrt(state["embeddings.position_embeddings"].shape[1] - 1)
    return Dinov2Config(
        hidden_size=width,
        num_hidden_layers=len(layers),
        num_attention_heads=width // HEAD_WIDTH,
        mlp_ratio=state["encoder.layer.0.mlp.fc1.weight"].shape[0] // width,
        image_size=grid * patch,
        patch_size=patch,
        num_channels=channels,
        use_mask_token=False,
        architectures=["Dinov2Model"],
        dtype="float32",
    )
