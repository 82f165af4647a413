"""A decoder's whole step in machine code, compiled on this machine at the first start.

    matmul.c, attention.c, decoder.c    the arithmetic (kernels.h has their law)
    compiler.py                         the sources -> a shared library in the cache folder
    structs.py                          what is passed to it, field by field
    weights.py                          a layer's matrices, packed for matmul.c
    decoder.py                          which models it computes, and one step of such a model

Everything else about a model stays transformers': its files, its config, its rotary frequencies. Models that this
cannot compute run as modules of transformers (models/attention.py), bit for bit as without a compiler.
"""
