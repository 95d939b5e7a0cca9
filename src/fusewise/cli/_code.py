"""The commands for one problem: its code at every stage, and a profile. Only parses arguments and calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from . import _completion
from ._options import Folder

EXIT_CODES = """\b
Exit codes:
  0    done; a provider that is missing or failed says why
  1    nothing could be shown (the messages say why)
  2    the command line is wrong
  130  interrupted
"""


def _problem(command: Callable[..., None]) -> Callable[..., None]:
    """The arguments and options that specify one problem."""
    for decorate in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option(
            "--timeout",
            type=click.FloatRange(min=1),
            default=300.0,
            show_default=True,
            help="Seconds after which a provider times out.",
        ),
        click.option("--device", help="cpu or cuda[:index]. Default: the GPU if there is one."),
        click.option(
            "--pass", "pass_", type=click.Choice(["fwd", "bwd", "fwd+bwd"]), help="Default: the case's first."
        ),
        click.option("--dtype", help="fp32, bf16, fp16 or, on a GPU, tf32. Default: the case's own."),
        click.option(
            "--case",
            shell_complete=_completion.case,
            help="A case by name. Default: the first of the target's default preset.",
        ),
        click.option(
            "--input", "inputs", multiple=True, help='An argument of a function: "x=bf16[4096,4096]"; repeatable.'
        ),
        click.argument("target", shell_complete=_completion.target),
    ):
        command = decorate(command)
    return command


def _task(verb: str, target: str, providers: list[str] | None, options: dict[str, Any]) -> Any:
    from fusewise.lab import plan
    from fusewise.lab.code import commands

    request = plan.Request(
        target=target,
        inputs=options["inputs"],
        cases=(options["case"],) if options["case"] else (),
        providers=providers,
        passes=options["pass_"],
        dtypes=(options["dtype"],) if options["dtype"] else (),
        device=options["device"],
        timeout=options["timeout"],
    )
    try:
        return commands.the_task(request)
    except ValueError as error:  # problem arguments are parsed by the study, whose errors use its own name
        raise click.UsageError(f"{verb}: {str(error).removeprefix('study: ')}") from None


@click.command(
    epilog="""\b
Examples:
  fusewise code gelu --provider torch.compile --list
  fusewise code gelu --provider torch.compile --stage sass
  fusewise code rope --provider fusewise-triton --target sm_100 --out code/
  fusewise code my_file.py:my_function --input "x=bf16[4096,4096]" --provider eager --stage bytecode

"""
    + EXIT_CODES
)
@_problem
@click.option(
    "--provider",
    "names",
    multiple=True,
    shell_complete=_completion.provider,
    help="Provider whose code to show; repeatable. Default: all that a study would measure.",
)
@click.option("--stage", help="One stage (or kernel) by name; --list has them. Default: all.")
@click.option(
    "--target", "gpu", metavar="sm_NN", help="GPU to compile for; none is needed here. Default: the one here, or sm_90."
)
@click.option(
    "--out",
    type=Folder(),
    help="Write the texts and index.json here instead of printing.",
)
@click.option(
    "--list", "list_stages", is_flag=True, help="Print the stages with what was counted in them, not the texts."
)
def code(
    target: str,
    names: tuple[str, ...],
    stage: str | None,
    gpu: str | None,
    out: Path | None,
    list_stages: bool,
    timeout: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the code that compilers generate for TARGET, by stage.

    From Python's bytecode down to machine code; no GPU is needed.
    """
    from fusewise.lab.code import commands, triton_kernels

    if gpu is not None:
        try:
            triton_kernels.check(gpu)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
    task, entries = _task("code", target, list(names) or None, {**options, "timeout": timeout})
    if stage is not None and out is not None:
        raise click.UsageError("code: --out writes every stage, got --stage, too; leave one out")

    def progress(name: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"{name} …", err=True)

    try:
        index = commands.code(task, entries, target=gpu, stage=stage, out=out, timeout=timeout, progress=progress)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"code: the folder must be writable, got {error}; choose another --out") from None
    if as_json:
        click.echo(json.dumps(index))
    else:
        click.echo(commands.listing(index) if list_stages or out else commands.texts(index))
    if out is not None:
        click.echo(f"index: {out / 'index.json'}", err=True)
    if not any(provider["stages"] for provider in index["providers"]):
        sys.exit(1)


@click.command(
    epilog="""\b
Examples:
  fusewise profile gelu --provider torch.compile
  fusewise profile rope --provider eager --case llama-3-8b-decode-b64 --out profiles/eager

"""
    + EXIT_CODES
)
@_problem
@click.option(
    "--provider",
    "name",
    default="eager",
    show_default=True,
    shell_complete=_completion.provider,
    help="Provider to profile.",
)
@click.option(
    "--out",
    type=Folder(),
    help="Folder for the files. Default: fusewise-profiles/….",
)
def profile(target: str, name: str, out: Path | None, timeout: float, as_json: bool, **options: Any) -> None:
    """Profile one provider of TARGET.

    Prints torch.profiler's table and the traffic ledger; writes a flame graph (SVG) and a trace for Perfetto
    (ui.perfetto.dev).
    """
    from fusewise.lab.code import commands
    from fusewise.lab.folder import file_name

    task, entries = _task("profile", target, [name], {**options, "timeout": timeout})
    where = out or Path("fusewise-profiles") / file_name(f"{task.op}-{task.case}-{task.dtype}-{task.pass_}-{name}")
    try:
        found = commands.profile(task, entries[0], where, timeout)
    except OSError as error:
        raise click.ClickException(f"profile: the folder must be writable, got {error}; choose another --out") from None
    click.echo(json.dumps(found) if as_json else commands.profile_text(found))
    if found["status"] != "ok":
        sys.exit(1)
    click.echo(f"files: {', '.join(str(where / file) for file in found['files'])}", err=True)


VERBS = (code, profile)
