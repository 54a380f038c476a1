"""The reports' peak memory beside what the plan counts for their configurations, and what explains the differences."""

from dataclasses import dataclass

import pandas as pd

from vlftlib.plan import plan_memory
from vlftlib.recipes import get_recipe
from vlftlib.tables import REPORTED, format_table

RECIPES = {"LoRA": "lora_text_vision", "OFT": "oft_vision"}  # Report A's two
PLATFORMS = {"RTX 4090": dict(precision="bf16", attention="sdpa"), "Ascend 910B": dict(precision="fp16", attention="eager")}
WAYS = {  # neither report names a model's size, nor says of A whether it checkpoints
    "3B": dict(model="3B"),
    "7B": dict(model="7B"),
    "7B, checkpointed": dict(model="7B", gradient_checkpointing=True),
    "and all logits": dict(model="7B", gradient_checkpointing=True, all_logits=True),
}
B_PICTURE = 1280 * 28 * 28  # pixels of a long screenshot; the report only says that there is a limit

NOTES = """\
One column alone is within 10 % of every reported peak: 7B, checkpointed, a head that computes the logits of every token. On
the 4090 it is 1.4 to 2 GB above Report A's; one float32 copy of those logits is 1.6 GB, which a fused loss would not make. No
part counted here explains why A's 910B needs 2 GB more than its 4090: checkpointed, eager attention keeps one block's scores.
OFT is above LoRA because all 32 vision blocks have an adapter, not the last six.
Of Report B's 4-bit model the 4 GB are the quantised weights; embeddings and head stay as they are, another 2 GB. The 5 GB that
it saves by checkpointing the vision tower are nothing that its recipe needs: below the merger nothing trains. transformers'
own switch lets the embeddings ask for gradients, which sends a backward through the frozen tower; ours doesn't."""


@dataclass(frozen=True)
class ReportedPeaks:
    """A row a configuration: the peak in GB (1e9 bytes) that the report gives, and the plan's by `WAYS`; prints as a table."""

    table: pd.DataFrame

    def __str__(self) -> str:
        return f"{format_table(self.table)}\n\n{NOTES}"


def compare_reported() -> ReportedPeaks:
    """Plan Report A's LoRA and OFT on both platforms and Report B's run; takes a minute or two, of the processor alone."""
    claims = pd.read_csv(REPORTED / "claims.csv").set_index(["report", "claim"])["value"]
    configurations = [
        (f"A, {row.method}, {row.platform}", row.peak_memory_gb, RECIPES[row.method], dict(batch_size=8, **PLATFORMS[row.platform]))
        for row in pd.read_csv(REPORTED / "cost.csv").itertuples()
    ]
    words = dict(batch_size=4, weights="4bit", max_pixels=B_PICTURE, **PLATFORMS["RTX 4090"])
    configurations.append(("B, 4-bit, RTX 4090", claims["B", "peak memory on the 4090"], "hybrid_staged", words))
    rows = {}
    for name, reported, recipe, words in configurations:
        planned = {way: plan_memory(recipe=get_recipe(recipe), **options, **words).total / 1e9 for way, options in WAYS.items()}
        rows[name] = {"reported GB": reported} | planned
    table = pd.DataFrame.from_dict(rows, orient="index")
    return ReportedPeaks(table)
