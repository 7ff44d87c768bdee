"""`python -m rocm_serve`: the same as the `rocm-serve` command."""

from __future__ import annotations

from rocm_serve.cli import main

if __name__ == "__main__":
    main()
