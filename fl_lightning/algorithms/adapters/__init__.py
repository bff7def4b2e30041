"""Methods for pretrained models with LoRA adapters: only the adapters and the head are trained."""
