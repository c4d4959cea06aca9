"""For trainers: the engine's attention with gradients, and log-probs equal to the engine's to the bit.

    import os, rollspan.trainer
    os.environ.update(rollspan.trainer.environment())  # before the first matrix product
    rollspan.trainer.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="rollspan")
    log_probs = rollspan.trainer.score(model, [prompt + output])

``python -m rollspan.trainer`` prints the variables for a shell.
"""

from rollspan.numerics import environment
from rollspan.trainer.attention import NAME, register
from rollspan.trainer.scoring import batch_invariant, score

__all__ = ["NAME", "batch_invariant", "environment", "register", "score"]
