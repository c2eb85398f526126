"""How a node calls its masters: where its token goes, and which one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.proto.errors import Unauthenticated
from kvstrata.storage.masters.dialing import Dialing
from kvstrata.transfer.security import watched_file
from kvstrata.transfer.security.files import SecurityFiles
from kvstrata.transfer.security.tokens import OwnToken, new_token


def written(path: Path) -> str:
    token = new_token()
    fresh = path.with_name("fresh")
    fresh.write_text(token)
    fresh.chmod(0o600)
    fresh.replace(path)
    return token


def test_without_a_token_nothing_is_shown() -> None:
    dialing = Dialing()
    dialing.dial("master:1", "master:2", ()).close()
    assert dialing.shown() == ()


def test_the_token_of_now_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_file, "LOOK_S", 0.0)
    path = tmp_path / "token"
    first = written(path)
    dialing = Dialing(SecurityFiles(), OwnToken(path))
    assert dialing.shown() == (("authorization", f"Bearer {first}"),)
    second = written(path)
    assert dialing.shown() == (("authorization", f"Bearer {second}"),)


def test_a_channel_in_clear_is_not_opened_for_a_token_that_would_leave_this_host(tmp_path: Path) -> None:
    written(tmp_path / "token")
    token = OwnToken(tmp_path / "token")
    for target in ("127.0.0.1:1", "[::1]:1", "unix:/x"):
        Dialing(SecurityFiles(), token).dial("127.0.0.1:1", target, ()).close()
    with pytest.raises(Unauthenticated, match="not shown in clear"):
        Dialing(SecurityFiles(), token).dial("127.0.0.1:1", "10.0.0.1:1", ())
    Dialing(SecurityFiles(plain_tokens=True), token).dial("127.0.0.1:1", "10.0.0.1:1", ()).close()
