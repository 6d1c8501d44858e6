"""Greedy answers to a question about an image."""

import torch
from PIL import Image
from transformers import LlavaProcessor

from normalign.vlm.checkpoint import chat_format
from normalign.vlm.model import NormalignForConditionalGeneration


def pixels_of(processor: LlavaProcessor, images: list[Image.Image]) -> torch.Tensor:
    """Pixel values (B, 3, H, W), float32, of RGB images."""
    return processor.image_processor(images, return_tensors="pt")["pixel_values"]


@torch.no_grad()
def answer(
    model: NormalignForConditionalGeneration,
    processor: LlavaProcessor,
    image: Image.Image | None,
    question: str,
    max_new_tokens: int = 16,
) -> str:
    """Greedy answer to ``question`` about ``image`` (None: text only), in the format the model was trained with."""
    shared, own = chat_format(model, processor).prompt(question, image is not None)
    input_ids = torch.tensor([shared + own], device=model.device)
    # Passing pixel_values=None would still call the vision tower.
    visual = {} if image is None else {"pixel_values": pixels_of(processor, [image]).to(model.device, model.dtype)}
    output = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        **visual,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        suppress_tokens=[processor.image_token_id],
    )
    return processor.tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True).strip()
