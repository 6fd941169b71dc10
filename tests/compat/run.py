"""`make compat`: real clients, each in its own environment under .compat/, against a gateway over scripted rows.

The benchmark clients print their own acceptance figures beside ours. Installing all takes some minutes and 3 GB.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from services.gateway.fake import FakeCoordinator
from tests.browser.scripted import ScriptedService
from tests.services.byte_tokenizer import EOS, byte_tokenizer
from tests.services.gateway.live import serving
from tests.services.gateway.world import fake

HERE = Path(__file__).parent
HOME = HERE.parents[1] / ".compat"
TOKENIZER = HOME / "tokenizer"
PYTHON_CLIENTS = {"litellm": "litellm==1.110.2", "aiperf": "aiperf==0.13.0", "guidellm": "guidellm==0.8.1"}
NODE_CLIENTS = {"openai": "openai@6.49.0"}
BENCHMARKS = {"aiperf", "guidellm"}  # whose answers have rounds of every kind


async def call(*command: str | Path, cwd: Path | None = None, **variables: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=cwd,
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode(errors="replace")


async def installed(name: str, package: str, without: Sequence[str] = ()) -> tuple[int, str]:
    """Make the client's environment, once. `without` are packages it brings that are taken out again."""
    folder = HOME / name
    if (folder / "installed").exists():
        return 0, ""
    await asyncio.to_thread(venv.create, folder, with_pip=True, clear=True)
    code, output = await call(folder / "bin/pip", "install", "-q", package)
    if not code and without:
        code, output = await call(folder / "bin/pip", "uninstall", "-q", "-y", *without)
    if not code:
        (folder / "installed").touch()
    return code, output


async def python_client(name: str, package: str, url: str) -> tuple[int, str]:
    """Install it once, then run its script."""
    code, output = await installed(name, package)
    if code:
        return code, output
    script = HERE / f"{name}_client.py"
    return await call(HOME / name / "bin/python", script, SEQMTP_URL=url, SEQMTP_TOKENIZER=str(TOKENIZER))


def write_tokenizer() -> None:
    """The service's own, as Hugging Face's libraries read one: benchmark clients make their prompts with it."""
    TOKENIZER.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(TOKENIZER / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "model_max_length": 2048}
    (TOKENIZER / "tokenizer_config.json").write_text(json.dumps(config))


def service_for(name: str) -> FakeCoordinator:
    """What the client talks to."""
    return ScriptedService(delay_s=0.005) if name in BENCHMARKS else fake()


async def node_client(name: str, package: str, url: str) -> tuple[int, str]:
    """The same for Node; the script lies beside the package, where Node looks for it."""
    if shutil.which("npm") is None:
        return 0, "skipped: there is no npm here"
    folder = HOME / f"{name}-node"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "node_modules" / name).exists():
        code, output = await call("npm", "install", "--silent", "--no-audit", "--no-fund", package, cwd=folder)
        if code:
            return code, output
    shutil.copy(HERE / f"{name}_client.mjs", folder / "client.mjs")
    return await call("node", "client.mjs", cwd=folder, SEQMTP_URL=url)


async def main(wanted: Sequence[str]) -> int:
    """Every client, or those named; 1 if one of them failed."""
    failed = 0
    write_tokenizer()
    for clients, run in ((PYTHON_CLIENTS, python_client), (NODE_CLIENTS, node_client)):
        for name, package in clients.items():
            if wanted and package not in wanted and name not in wanted:
                continue
            async with serving(service_for(name)) as url:
                code, output = await run(name, package, url)
            note = output.rstrip() if code == 0 else "failed"
            print(f"{package:<24} {note or 'as with OpenAI'}", flush=True)
            if code:
                failed = 1
                print(output)
    return failed


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
