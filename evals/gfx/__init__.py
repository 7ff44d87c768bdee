"""GPU kernels for gfx942 and gfx950 on a machine without a GPU: compiled, checked, and executed in an emulator.

A provider is run as a server runs it: its Python function is called with the arguments of a case. Only the last step
is another one: where Triton's driver or the HIP runtime would hand a kernel to a GPU, `device.py` takes the code object
that was compiled for the architecture and the emulator executes it on CPU tensors. So host code, tile choice, grids and
kernels are all judged, and nothing about a kernel is told twice.

To add kernels: a tuple `TRIALS` (and `NOT_EMULATED`, with reasons) in a file `evals/gfx/kernels_<area>.py`; every such
file is read. A trial is one small call of one provider:

    Trial(
        op="rms_norm",                     # a name of ops/bind.py: its reference judges
        provider="triton",                 # a name of Op.others; its load() and prepare_weights are used
        case="3 x 2560",                   # what is shown in tables
        arguments=lambda generator, arch: {...},  # keyword arguments, tensors on the CPU; rows in bfloat16
        kernels=("rms_norm_kernel",),      # the device functions that this call launches: all of them, by name
    )

`arch` is "gfx942" or "gfx950": FP8 tensors are torch.float8_e4m3fnuz on the first, torch.float8_e4m3fn on the second
(`registry.fp8_dtype`). Inside a trial `triton.runtime.driver.active.get_current_target()` answers for that
architecture, so a provider that asks Triton for it needs nothing else. A provider must not refuse CPU tensors itself.
Every launch is compiled and checked; those of a trial with `compile_only=True` are not executed: for tiles of real
sizes (memory that is never touched costs nothing: torch.empty). Keep executed trials small: the emulator does 20 to
60 thousand wave instructions a second, so a few tiles of each kernel, never a whole matrix. Cover both sides of each
mask: a size that is no multiple of the tile.

A check that a kernel cannot hold is listed with its reason in `exceptions`, e.g. {"route_kernel:wide_stores": "an id
and a weight for each row"}; the names of the checks are in `checks.py`. `native_fp8` names kernels whose products must
be FP8 MFMA.

    make compile-gfx                       every launch of every trial compiled, checked, compared with resources.json
    make emulate                           every trial executed, with fresh random inputs, against its reference
    python -m evals.gfx emulate --only rms_norm          the trials whose name contains the words
    python -m evals.gfx compile --write; python -m evals.gfx emulate --write; python -m evals.gfx table --write
                                           after adding or changing a kernel: the committed tables and docs/evidence.md
    python -m evals.gfx record cuda "H200, 2026-11-30" "hip *"
                                           after a run on a GPU, by hand: the columns that nothing here can fill
"""
