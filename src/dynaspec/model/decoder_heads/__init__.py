"""Heads: drafters of a decoder layer or a few that read hidden states of their target and keep KV of their own.

EAGLE-1 and 2 (Li et al., 2401.15077, 2406.16858), EAGLE-3 (2503.01840), and the prediction layers of targets that were
trained to predict several tokens (MTP; Gloeckle et al., 2404.19737).
"""
