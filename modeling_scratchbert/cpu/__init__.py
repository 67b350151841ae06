"""Faster inference on a CPU, with prepacked weights: weights in oneDNN's blocked layout, in float32, bfloat16 or int8.

`optimization` replaces the stack of blocks by the one in `stack`, after the checks of `structure`, and the linear
layers of model heads by those in `layers`. The weights are in the matrices of `matrices`; `calibration` finds the
factors of int8. This subpackage is installed, and not copied into saved models, so that a repaired version works for
models that were saved before. The classes of a model may come from a copy of the code: they are recognised by their
names, never by identity.
"""
