"""Methods for pretrained models with LoRA adapters, of which only the adapters and the head are trained."""
