"""A provider's process for inspection instead of timing: code by stage, memory traffic, profiles.

Uses the protocol of `lab/worker.py` with the requests `stages`, `traffic` and `profile`. Texts are written to the
folder named in the request; the reply has their index. Compilers are patched and devices faked in this process, so
nothing else may run in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .. import plugin, targets, worker
from ..folder import file_name
from ..ledger import Ledger
from ..problem import Problem, Task
from ..reason import log_error, reason
from ..record import MEND
from ..schema import check
from .stage import SUFFIXES, Stage


class Server:
    """Serves requests for one provider."""

    def __init__(self, provider: plugin.Provider) -> None:
        self.provider = provider

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Execute the request; any error of a compiler becomes a status and a reason."""
        try:
            task = Task(**request["task"])
            # Its code needs its library, but not its device.
            self.provider.check(task.device if request["do"] == "profile" else self.provider.devices[0])
            problem = targets.problem_for(task)
            if request["do"] == "stages":
                stages = self.provider.stages(problem, request["target"])
                return {"ok": True, "stages": write(stages, self.provider.name, Path(request["folder"]))}
            if request["do"] == "traffic":
                ledger = self.ledger(problem, request["target"]).to_json()
                check(ledger, "ledger", MEND)
                return {"ok": True, "ledger": ledger}
            if request["do"] == "profile":
                from ..profile import capture

                return {"ok": True, **capture(problem, self.provider.build(problem), Path(request["folder"]))}
            raise ValueError(f"unknown request {request['do']!r}")
        except (plugin.Missing, plugin.Unsupported) as error:
            return {"ok": False, "status": "missing", "reason": str(error)}
        except Exception as error:  # compilers raise anything; the index reports it
            log_error()
            return {"ok": False, "status": "failed", "reason": reason(error)}

    def ledger(self, problem: Problem, target: str) -> Ledger:
        kernels = tuple(self.provider.traffic(problem.compact(), target))
        op, case, dtype, pass_ = problem.task.key
        return Ledger(
            op=op, case=case, dtype=dtype, pass_=pass_, provider=self.provider.name, kernels=kernels,
            bytes_min=problem.bytes_min(),
        )  # fmt: skip


def write(stages: Iterable[Stage], provider: str, folder: Path) -> list[dict[str, Any]]:
    """Write each stage to a file `NN-stage-part.suffix`; returns their index entries."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for order, stage in enumerate(stages):
        words = [stage.stage, *([stage.target] if stage.stage == "wrapper" else []), stage.part]
        name = file_name("-".join(filter(None, words)).replace(" ", "-"))
        path = folder / f"{order:02d}-{name}{SUFFIXES[stage.language]}"
        entry = {**stage.entry(provider, order), "file": f"{folder.name}/{path.name}"}
        check({**entry, "text": stage.text}, "stage", MEND)
        path.write_text(stage.text, encoding="utf-8", errors="backslashreplace")
        entries.append(entry)
    return entries


def serve(requests: Iterable[str], send: Callable[[dict[str, Any]], None], start: dict[str, Any]) -> None:
    """Load the provider named in `start`, then answer requests until they end."""
    try:
        server = Server(plugin.load(start["provider"]))
        versions = plugin.versions(server.provider)
    except Exception as error:  # a provider's module may raise anything
        log_error()
        send({"id": 0, "ok": False, "status": "failed", "reason": reason(error)})
        return
    send({"id": 0, "ok": True, "versions": versions})
    for line in requests:
        request = json.loads(line)
        send({"id": request["id"]} | server.answer(request))


def main() -> None:
    """Talk over the original stdin and stdout, like a timing worker."""
    worker.main(serve)


if __name__ == "__main__":
    main()
