"""Real bugs of other engines, planted one at a time in the processes of a rank: what sees them, and what does not.

    python -m evals.planted list
    python -m evals.planted parity --model evals/tiny/checkpoint [--fault NAME]
    python -m evals.planted.serve FAULT --model evals/tiny/checkpoint --tp 2 --pp 2 ...

A fault is a patch made inside a worker process by a module of this folder, which is named to the supervisor in place of
the real worker. No flag of the product leads here.
"""
