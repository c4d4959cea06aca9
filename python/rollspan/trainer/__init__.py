"""For trainers: the engine's attention with gradients, and log-probs equal to the engine's to the bit.

    import os, rollspan.trainer
    os.environ.update(rollspan.trainer.environment())  # before the first matrix product
    rollspan.trainer.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="rollspan")
    log_probs = rollspan.trainer.score(model, [prompt + output])

``python -m rollspan.trainer`` prints the variables for a shell.

And its weights on the way to the engines:

    with rollspan.trainer.WeightSender("http://127.0.0.1:8000", transport="http") as sender:
        sender.send(model, weight_version="step-42")
"""

from rollspan.numerics import environment
from rollspan.trainer.attention import NAME, register
from rollspan.trainer.scoring import batch_invariant, score
from rollspan.trainer.sender import SentWeights, WeightSender
from rollspan.trainer.server import WeightSendError

__all__ = [
    "NAME",
    "SentWeights",
    "WeightSendError",
    "WeightSender",
    "batch_invariant",
    "environment",
    "register",
    "score",
]
