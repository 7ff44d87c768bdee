"""Executes code objects of gfx942 and gfx950 on the CPU, one wave of 64 lanes at a time.

Decoding is llvm-objdump's; the meaning of each instruction is written here from AMD's public ISA documents. Every
access to memory and LDS is checked against the buffers that were passed. What it does not know raises EmulatorError.

Not modelled: time, waits and hazards, denormal modes, scratch, several workgroups at once (they run one after the
other). The transcendental functions are rounded correctly, hardware is within about one unit of fp32; products of
matrix cores are summed in float64 and rounded once. It was never compared with a real GPU.
"""
