"""Variables that may be secrets: a warm server has none of them, its workers have those of their own job."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.warm import Place

SCRIPT = "import os\nprint(os.environ.get('TEST_API_KEY'), os.environ.get('OTHER_TOKEN'))\n"


@pytest.mark.timeout(120)
def test_each_job_has_its_own_secrets_and_the_server_has_none(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Place() as place:
        pids = set()
        for key, token in (("first-key", "a-token"), ("second-key", "a-token"), ("first-key", "another")):
            more = {"TEST_API_KEY": key, "OTHER_TOKEN": token}
            done = place.run(str(script), cwd=tmp_path, more=more)
            assert done.stdout == f"{key} {token}\n", done.stderr
            pid = place.server().pid
            pids.add(pid)
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"PATH=" in environ
            assert b"API_KEY" not in environ
            assert b"TOKEN=" not in environ.replace(b"DSL_TEST_TOKEN=", b"")
        assert len(pids) == 1


SECRETS = {
    "TOKEN": "hidden-1",
    "MYSQL_PWD": "hidden-2",
    "SIGNING_PASSPHRASE": "hidden-3",
    "SENTRY_DSN": "https://hidden-4@host/1",
    "STORAGE_CONNECTION_STRING": "hidden-5",
    "DATABASE_URL": "postgres://me:hidden-6@host/db",
}


@pytest.mark.timeout(120)
def test_a_secret_is_told_by_the_name_or_by_a_password_in_a_url(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import os\nprint([os.environ[name] for name in {list(SECRETS)}])\n")
    with Place() as place:
        done = place.run(str(script), cwd=tmp_path, more={**SECRETS, "PROJECT_URL": "https://me@host"})
        assert done.stdout == f"{list(SECRETS.values())}\n", done.stderr
        environ = Path(f"/proc/{place.server().pid}/environ").read_bytes()
        assert b"PROJECT_URL=" in environ
        assert b"hidden" not in environ


@pytest.mark.timeout(120)
def test_a_module_that_asks_for_a_secret_is_imported_by_the_workers(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text("import os\nfound = os.environ.get('TEST_API_KEY')\n")
    script = tmp_path / "train.py"
    script.write_text("import asks\nprint(asks.found)\n")
    with Place() as place:
        words = ("--preload", "asks", str(script))
        done = place.run(*words, cwd=tmp_path, more={"TEST_API_KEY": "secret"})
        assert (done.returncode, done.stdout) == (0, "secret\n")
        assert "asks reads TEST_API_KEY when it is imported, which only workers get" in done.stderr
        assert place.sockets() == []
