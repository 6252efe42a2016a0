"""Speculation: tokens guessed cheaply and verified together, so that one step of the model yields several.

drafter.py is the interface of those who guess (ngram.py, draft_model.py, mtp.py), acceptance.py the arithmetic of
verification, verifier.py its application to a step, adaptive.py the choice of how much to guess, and speculator.py
what the core's step calls. What a request answers never depends on a guess in value (greedily) or in distribution.
"""
