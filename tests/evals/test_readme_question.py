"""The question that the README asks the trained checkpoint: it is asked as it stands there, and answered rightly."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

from evals.smoke import served

ROOT = Path(__file__).parents[2]


def test_the_readmes_question_is_answered() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (body,) = re.findall(r"-d '(\{\"model\": \"tiny\".*?\})'", readme, re.DOTALL)
    with served(ROOT / "evals" / "tiny" / "checkpoint", "--served-model-name tiny --device cpu") as url:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", body.encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            text = json.load(response)["choices"][0]["text"]
    assert text.strip().endswith("#### 19"), text
