"""From the logits of a step to tokens: parameters, penalties, structures, log-probs."""
