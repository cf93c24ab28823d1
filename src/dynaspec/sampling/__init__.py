"""Logit processors, counter-based random numbers, and drawing tokens.

The order of the processors and the meaning of their parameters are vLLM's. All of it works on *rows* of logits,
each of which belongs to a running request (its *lane*) and has seen some drafted tokens beyond the request's
committed output; what comes out for a row depends on that row and on nothing else in the batch, bit for bit.
"""
