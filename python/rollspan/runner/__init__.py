"""From a loaded model to the logits of a step: which forward computes them, over which cache, and that it is right."""
