"""What `lagrpo plan` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lagrpo.planning.layouts import update_bytes
from lagrpo.planning.plan import MODEL, Option, Plan
from lagrpo.training.explain import HOST

LOWER = (
    "lower optimizer.micro_batch_tokens or sampling.max_num_seqs, set optimizer.activation_checkpointing = true, or "
    "take more GPUs"
)
SHOWN = 12  # layouts in the table: all, or the fastest of more


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan: layouts, where the time of the best one goes, what v buys, memory, and what it all rests on."""
    console = console or Console()
    console.print(Text(f"This is {MODEL}: what it rests on stands at the end.", "bold"))
    console.print(_head(plan))
    console.print(_layouts(plan))
    if not plan.best.fits:
        console.print(Text(f"{plan.best.layout.name} does not fit: {LOWER}", "yellow"))
    console.print(_of_time(plan))
    console.print(_of_v(plan))
    console.print(_of_memory(plan))
    console.print(_figures(plan))


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, box=SIMPLE, header_style="dim", title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", overflow="fold")
    return table


def _head(plan: Plan) -> Table:
    work, model, lengths, layout = plan.work, plan.model, plan.work.lengths, plan.best.layout
    head = Table.grid(padding=(0, 2, 0, 0))
    across = f"{plan.gpus} x {plan.device}" + (", processes that share one machine" if plan.rates.shared else "")
    facts = {
        "model": f"{plan.path}: {model.parameters / 1e6:,.0f} M parameters of {model.size} bytes"
        + (f", frozen; {model.adapters / 1e6:,.1f} M numbers of adapters are trained" if model.adapters else ""),
        "machine": across,
        "batch": f"{work.prompts} prompts x {work.G} completions, i = {work.i}, {work.kind}({work.v})",
        "lengths": f"prompts of {lengths.prompt:,.0f} tokens, completions of {lengths.mean:,.0f} (longest "
        f"{lengths.longest:,.0f}), {work.learned:.0%} of them in the loss",
        "moves": f"a weight sync {size(model.synced)} "
        + (f"to each server by {layout.wire}" if layout.servers else "within each rank")
        + (f"; an update {size(update_bytes(model, layout.ranks))} from each rank" if layout.ranks > 1 else ""),
    }
    for label, text in facts.items():
        head.add_row(Text(label, "dim"), Text(text))
    return head


def _layouts(plan: Plan) -> Table:
    columns = (
        "serve + learn",
        "s a batch",
        "for samples",
        "learning",
        "between ranks",
        "sync",
        "learner",
        "server",
        "fits",
    )
    table = _table("Splits of the GPUs", *columns)
    for option in shown(plan.options, plan.best):
        s = option.seconds
        mark, style = (" *", "bold") if option == plan.best else ("", "" if option.fits else "dim")
        cells = [option.layout.name + mark]
        cells += [seconds(x) for x in (s.total, s.sampling, s.learning + s.scoring, s.collectives, s.sync)]
        cells += [size(option.learner), size(option.server) if option.server else "–", _fits(option)]
        table.add_row(*(Text(cell, style) for cell in cells))
    asked = len({option.layout.servers for option in plan.options}) > 1
    table.caption = f"* {'planned below' if asked else 'the only one'}; memory at the most, of one GPU"
    if any(option.layout.layers for option in plan.options):
        table.caption += "; layers: with distributed.shard = 'layers'"
    table.caption_justify = "left"
    return table


def _fits(option: Option) -> str:
    if option.room is None:
        return "?"
    return "no" if not option.fits else "layers" if option.layout.layers else "yes"


def shown(options: Sequence[Option], best: Option) -> list[Option]:
    """All layouts, or of many the fastest ones, the colocated one and the best, in their order."""
    fastest = sorted(options, key=lambda option: option.seconds.total)[:SHOWN]
    return [o for o in options if len(options) <= SHOWN or o in fastest or o == best or not o.layout.servers]


def _of_time(plan: Plan) -> Table:
    found, waits = plan.best.seconds, plan.best.layout.servers
    table = _table(
        f"Where the time of a batch goes ({plan.best.layout.name})", "part", "s a batch", "share", "what it is"
    )
    table.columns[-1].justify = "left"
    words = {
        "sampling": f"waiting for completions; the sampler works {seconds(found.generating)} s for them"
        if waits
        else "generating completions",
        "judging": "what outlasts sampling",
        "learning": f"{plan.work.i} update{'s' if plan.work.i > 1 else ''}, optimizer included",
        "collectives": "gradients and weights between ranks",
        "scoring": "completions that the loss leaves out, for metrics of the lag",
        "sync": "the weight sync's share of a batch",
        "rest": "recording",
    }
    for part, value in found.parts().items():
        table.add_row(part, seconds(value), f"{value / found.total:.0%}", Text(words[part], "dim"))
    table.add_row(Text("total", "bold"), Text(seconds(found.total), "bold"), "", "")
    return table


def _of_v(plan: Plan) -> Table:
    columns = (
        "v",
        "s a batch",
        "times v = 1",
        "for samples",
        "sync, s a batch",
        "sync, bytes a batch",
        "largest lag, updates",
    )
    table = _table(f"What v buys ({plan.best.layout.name})", *columns)
    one = next(lag.seconds for lag in plan.lags if lag.v == 1)
    for lag in plan.lags:
        s, style = lag.seconds, "bold" if lag.v == plan.work.v else ""
        cells = [str(lag.v), seconds(s.total), f"{s.total / one.total:.2f}", seconds(s.sampling), seconds(s.sync)]
        table.add_row(*(Text(cell, style) for cell in [*cells, size(lag.sync_bytes), f"{lag.largest_lag:,}"]))
    return table


def _of_memory(plan: Plan) -> Table:
    ranks = plan.best.layout.ranks
    table = _table(f"Memory of a rank that learns, of {ranks}: at the most", "", *plan.memory)
    names = {"optimizer": "masters and moments sharded", "layers": "layers sharded (FSDP2)"}
    for column, name in zip(table.columns[1:], plan.memory, strict=True):
        column.header = names[name]
    purposes = dict.fromkeys(purpose for of in plan.memory.values() for purpose in of)
    for purpose in purposes:
        on_host = " (host)" if plan.best.room is not None and purpose in HOST else ""
        table.add_row(purpose + on_host, *(size(of.get(purpose, 0)) for of in plan.memory.values()))
    return table


def _figures(plan: Plan) -> Table:
    table = _table("What it rests on", "figure", "value", "source", left=3)
    for figure in plan.rates.figures:
        table.add_row(figure.name, figure.value, Text(figure.source, "dim"))
    return table


def seconds(value: float) -> str:
    """Three digits.

    >>> seconds(0.01234), seconds(12.34), seconds(0.0), seconds(4321.0), seconds(8.1e-5)
    ('0.0123', '12.3', '0', '4,321', '<.001')
    """
    if 0 < value < 0.001:
        return "<.001"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size(value: float) -> str:
    """Bytes as people read them.

    >>> size(269e6), size(1.5e11), size(0)
    ('269 MB', '150 GB', '0 MB')
    """
    return f"{value / 1e9:.3g} GB" if value >= 1e9 else f"{value / 1e6:.3g} MB"
