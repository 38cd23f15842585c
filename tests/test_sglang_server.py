"""An interpreter for the SGLang server is looked at before it is used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from m2flow.engines.sglang_server import check_version
from m2flow.errors import EngineError, MissingExtra


def test_an_interpreter_without_sglang_is_named_with_what_to_install() -> None:
    with pytest.raises(MissingExtra, match=f"sglang, which {sys.executable} does not have") as raised:
        check_version(sys.executable)
    assert "rollout.options.python" in str(raised.value)


def test_an_interpreter_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nowhere/python can't be run"):
        check_version(str(tmp_path / "nowhere" / "python"))


def test_an_sglang_that_is_too_old_is_refused_with_the_version_that_will_do(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 0.4.9.post2\n")
    fake.chmod(0o755)
    with pytest.raises(MissingExtra, match=r"SGLang 0.4.9.post2 .* lacks .* 0\.5\.20 has it"):
        check_version(str(fake))
