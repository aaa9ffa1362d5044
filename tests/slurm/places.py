"""Where the tests of this folder run commands: the folder of the stub commands, and folders that hold the graph."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STUBS = HERE / "stubs"

SEARCH_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
"""Where commands are looked for: in the environment of these tests first, whether or not it was activated."""

STARTED: list[subprocess.Popen] = []
"""What `Graph.start` has started; none of it outlives its test."""


def clean_environment() -> dict[str, str]:
    """This environment without what a surrounding SLURM job, or another test, set."""
    foreign = ("SLURM_", "SBATCH_", "SRUN_", "STUB_SLURM_")
    return {k: v for k, v in os.environ.items() if not k.startswith(foreign)} | {"PATH": SEARCH_PATH}


class Stubs:
    """The stub commands, with their log and jobs in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "stub.jsonl"
        self.env = clean_environment() | {"STUB_SLURM_LOG": str(self.log), "PATH": f"{STUBS}:{SEARCH_PATH}"}

    def settings(self, **settings: object) -> dict[str, str]:
        """The environment with `settings` as STUB_SLURM_ variables, in JSON."""
        return self.env | {f"STUB_SLURM_{name}": json.dumps(value) for name, value in settings.items()}

    def run(self, *command: str, **settings: object) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder."""
        env = self.settings(**settings)
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=300)

    def calls(self, command: str) -> list[list[str]]:
        """The arguments of each call of a command so far."""
        lines = map(json.loads, self.log.read_text().splitlines())
        return [line["argv"] for line in lines if line["command"] == command]

    def state(self, job: str) -> str:
        return self.run("sacct", "-X", "-n", "-j", job, "--format=JobIdRaw,State").stdout.strip().partition("|")[2]

    def wait(self, job: str, wanted: Callable[[str], bool]) -> str:
        end = time.monotonic() + 30
        while not wanted(state := self.state(job)):
            assert time.monotonic() < end, f"job {job}: still {state}"
            time.sleep(0.1)
        return state


class Graph:
    """The project's graph in a folder of its own, whose code is this checkout's; its store may be shared."""

    def __init__(self, folder: Path, env: dict[str, str], store: Path | None = None, **changed: object) -> None:
        """`changed` are top-level keys of the config, merged into those of tiny.yaml.

        Where `store` was filled by the fixture of that name, the manifests of its data are there already.
        """
        self.folder, self.env = folder, env
        for name in ("Snakefile", "rules", "config", "src", "envs", "profiles"):
            (folder / name).symlink_to(ROOT / name)
        config = yaml.safe_load((HERE / "tiny.yaml").read_text())
        for key, value in changed.items():
            config[key] = config.get(key, {}) | value if isinstance(value, dict) else value
        if store:
            config["store"] = str(store)
        (folder / "site.yaml").write_text(yaml.safe_dump(config))
        self.results = folder / "results/tiny"
        made = store.parent / "one/results/tiny" if store else None
        if made and made.is_dir() and made != self.results:
            shutil.copytree(made / "data", self.results / "data")
            for name in ("data.yaml", "tokenizer.yaml"):
                (self.results / "settings").mkdir(exist_ok=True)
                shutil.copy2(made / "settings" / name, self.results / "settings" / name)

    def command(self, *options: str) -> list[str]:
        """Snakemake with short waits, since no job here takes long."""
        short = ["--latency-wait", "5"]
        if {"--executor", "--workflow-profile"} & set(options):
            # After a look that finds nothing new the executor adds ten seconds; a real job takes some seconds.
            first = "3" if "STUB_SLURM_LOG" in self.env else "8"
            short += ["--slurm-init-seconds-before-status-checks", first, "--seconds-between-status-checks", "1"]
        return [sys.executable, "-m", "snakemake", "--configfile", "site.yaml", *short, *options]

    def run(self, *options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run Snakemake to its end."""
        command = self.command(*options)
        env = env or self.env
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=400)
        (self.folder / "last.log").write_text(done.stdout + done.stderr)  # for whoever has to find out why
        return done

    def start(self, *options: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start Snakemake as a terminal would: a group of its own, which hears Ctrl-C."""
        log = (self.folder / "started.log").open("w")
        process = subprocess.Popen(
            self.command(*options),
            cwd=self.folder,
            env=env or self.env,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        STARTED.append(process)
        return process

    def pretend(self, *paths: str) -> None:
        """Empty files in the place of results."""
        for path in paths:
            (self.results / path).parent.mkdir(parents=True, exist_ok=True)
            (self.results / path).touch()

    def log(self) -> str:
        """What a started Snakemake has said so far."""
        return (self.folder / "started.log").read_text()


def wait_until(true: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Wait until `true`; fail saying `what` was waited for."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.2)
