"""Faster inference on a CPU, with prepacked weights, in float32, bfloat16 or int8.

`optimization` replaces the stack of blocks by the one in `stack`, after the checks of `structure`, and the layers
outside of it by those in `layers`. The weights are in the matrices of `matrices`. A library in C++ computes with them
(`library`, `native/`), or else `fallback` does, in torch's operators. `calibration` finds the factors of int8.

This subpackage is installed, and not copied into saved models, so that a repaired version works for models that were
saved before. The classes of a model may come from a copy of the code: they are recognised by their names, never by
identity.
"""
