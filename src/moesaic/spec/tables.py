"""The tables of a run file: every key with its type, unit, default and one line of help.

These classes are the one place that knows the keys. The reader, `--set`, `moesaic explain`, the resolved run.toml
and the error messages are all derived from them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


def _key(default: Any, help: str, unit: str = "", derived: str = "", **limits: Any) -> Any:
    """A field with its help, its unit, and (for a default that depends on other keys) the rule in words."""
    return Field(default, description=help, json_schema_extra={"unit": unit, "derived": derived}, **limits)


class Table(BaseModel):
    """Base of the tables: immutable, typed as TOML is, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class ModelTable(Table):
    """Which model: a preset, a Hugging Face folder, or the keys of a Hugging Face config."""

    model_config = ConfigDict(extra="allow")

    preset: str | None = _key(None, "Name of a built-in model; other keys of this table override its config.")
    hf: str | None = _key(None, "Folder or config.json of a Hugging Face model; other keys override its config.")
    init: Literal["random", "hf", "upcycle"] = _key(
        "random", "Where weights come from: chance, the folder `hf`, or the dense model `upcycle_from`."
    )
    upcycle_from: str | None = _key(
        None, "Dense model whose MLPs become the experts: a run, a step-N checkpoint, or a Hugging Face folder."
    )
    upcycle_noise: float = _key(
        0.0, "Noise that parts the copies of an upcycled expert, in standard deviations of each of its tensors.", ge=0.0
    )

    @property
    def inline(self) -> dict[str, Any]:
        """The keys of a Hugging Face config given in the table itself."""
        return dict(self.model_extra or {})


class DataTable(Table):
    """What is read: files, their format, and how documents become sequences."""

    path: str | None = _key(None, "File, folder or pattern to train on, relative to the current directory.")
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "megatron"] = _key(
        "auto", "Format of the files; `auto` decides by their names."
    )
    text_key: str = _key("text", "Column or JSON key that holds the text.")
    tokenizer: str = _key(
        "bytes", '"bytes", a tokenizer.json or its folder, or "bpe:8192" to learn that many from the data.'
    )
    validation_path: str | None = _key(None, "File or folder of held-out data, in the same format.")
    validation_fraction: float = _key(
        0.01,
        "Share of the documents held out when there is no validation_path.",
        derived="0.01, or 0 with a validation_path",
        ge=0.0,
        lt=1.0,
    )
    pack: bool = _key(True, "Fill sequences with whole documents one after the other instead of one each.")
    document_mask: bool = _key(True, "Tokens attend only within their own document.")
    add_document_end: bool = _key(True, "Put the tokenizer's end-of-document token after every document.")

    @model_validator(mode="before")
    @classmethod
    def _hold_out_once(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("validation_path") and "validation_fraction" not in values:
            return values | {"validation_fraction": 0.0}
        return values


class LayoutTable(Table):
    """How the work is spread: degrees of parallelism, and what is done with memory and communication."""

    tp: int = _key(1, "Tensor-parallel degree of the dense part.", "processes", ge=1)
    cp: int = _key(1, "Context-parallel degree: a sequence is split over this many.", "processes", ge=1)
    cp_kind: Literal["ulysses", "ring"] = _key("ulysses", "Context parallelism by all-to-all over heads, or a ring.")
    pp: int = _key(1, "Pipeline stages.", "processes", ge=1)
    virtual_stages: int = _key(1, "Model chunks per pipeline stage (interleaving).", "chunks", ge=1)
    stages: str | None = _key(
        None,
        "What stands on which virtual stage, in the letters of docs/layout.md; layers are dealt evenly if left out.",
    )
    schedule: Literal["auto", "1f1b", "interleaved", "zero_bubble"] = _key(
        "auto", "Order of micro-batches in the pipeline; `auto` is interleaved with virtual stages, else 1f1b."
    )
    order: Literal["pp-outer", "dp-outer"] = _key(
        "pp-outer", "Slowest axis of the ranks: which of pipeline and data parallelism crosses the slow links."
    )
    ep: int = _key(1, "Expert-parallel degree: experts are spread over this many.", "processes", ge=1)
    etp: int = _key(1, "Tensor-parallel degree inside an expert.", "processes", ge=1)
    dp: int | Literal["auto"] = _key("auto", "Data-parallel degree; `auto` takes what the processes leave over.")
    sharding: Literal["none", "optimizer", "gradients", "parameters"] = _key(
        "none", "What is sharded over data parallelism; each level includes the ones before it."
    )
    replicas: int = _key(
        1, "Copies of the sharded state: sharding within groups, all-reduce between them (HSDP).", "copies", ge=1
    )
    micro_batch: int = _key(1, "Sequences in one forward pass of one data-parallel rank.", "sequences", ge=1)
    dispatcher: Literal["auto", "local", "allgather", "alltoall", "hierarchical", "flex"] = _key(
        "auto", "How tokens travel to their experts; `local` where every expert is in this process."
    )
    dispatcher_backend: Literal["portable", "deepep", "hybridep"] = _key(
        "portable", "What the flex dispatcher runs on: moesaic's own hierarchical one, or a library for NVIDIA GPUs."
    )
    overlap: Literal["none", "auto"] | list[str] = _key(
        "none",
        "What runs at the same time: any of gradients, parameters, tensor, inside, experts, weight_gradients, "
        "between; `auto` takes what the cost model finds fastest on the cluster of cluster.gpu.",
    )
    inside_chunks: int | Literal["auto"] = _key(
        "auto",
        "In how many chunks rows to experts, and heads of Ulysses attention, travel with overlap inside; 1 cuts "
        "nothing, `auto` is what the cost model finds fastest on the cluster of cluster.gpu, and 2 without one.",
        "chunks",
    )
    recompute: Literal["none", "auto"] | list[str] = _key(
        "none",
        "Modules computed again in the backward pass instead of kept: any of layernorm, core_attn, moe_act, mlp, "
        "shared_experts, mla_up_proj, moe, loss, full, or the set sar (layernorm, moe_act); `auto` takes the fastest "
        "set that fits the memory of cluster.gpu.",
    )
    recompute_stages: list[list[str]] = _key(
        [],
        "Modules computed again by pipeline stage, instead of recompute: one list for each of the pp ranks, empty for "
        "none.",
    )
    recompute_method: Literal["uniform", "block"] = _key(
        "uniform",
        "Which layers full recomputes: uniform all of them, recompute_layers at a time from the input of their first; "
        "block the first recompute_layers of each virtual stage, each on its own.",
    )
    recompute_layers: int | None = _key(
        None,
        "Layers that full recomputes together (uniform, 1 if left out), or at all on each virtual stage (block).",
        "layers",
        ge=1,
    )
    recompute_headroom: float = _key(0.05, 'Share of memory that `recompute = "auto"` leaves free.', ge=0.0, lt=1.0)
    offload: list[str] = _key([], "What waits in host memory: any of optimizer, activations.")
    offload_fraction: float = _key(
        1.0, "Share of the optimizer's state that waits in host memory with offload optimizer.", ge=0.0, le=1.0
    )
    offload_modules: list[str] = _key(
        ["norms", "attention", "mlp", "moe"],
        "Parts of a layer whose kept activations wait in host memory with offload activations.",
    )
    compression: list[str] = _key(
        [],
        "What travels with fewer bits, which changes results a little: dispatch (rows to experts in fp8), gradients "
        "(data-parallel sums sent in bf16, added in fp32).",
    )


class TrainTable(Table):
    """The training itself: steps, batch, optimizer, precision and how often things are written."""

    steps: int = _key(1000, "Optimizer steps.", "steps", ge=1)
    seq_len: int = _key(1024, "Length of a training sequence.", "tokens", ge=1)
    global_batch: int = _key(32, "Sequences per optimizer step over all processes.", "sequences", ge=1)
    lr: float = _key(3e-4, "Peak learning rate.", gt=0.0)
    min_lr_ratio: float = _key(0.1, "Final learning rate over the peak.", ge=0.0, le=1.0)
    schedule: Literal["cosine", "wsd", "constant"] = _key(
        "cosine", "Learning rate after warm-up: cosine, warm-up/stable/decay, or constant."
    )
    warmup_steps: int = _key(100, "Steps of linear warm-up.", "steps", "a tenth of steps, at most 100", ge=0)
    decay_fraction: float = _key(0.2, "Share of the steps at the end in which `wsd` decays.", ge=0.0, le=1.0)
    weight_decay: float = _key(0.1, "AdamW's decoupled weight decay on matrices.", ge=0.0)
    beta1: float = _key(0.9, "AdamW's decay of the first moment.", ge=0.0, lt=1.0)
    beta2: float = _key(0.95, "AdamW's decay of the second moment.", ge=0.0, lt=1.0)
    eps: float = _key(1e-8, "AdamW's epsilon.", gt=0.0)
    clip: float = _key(1.0, "Largest norm of all gradients together; 0 leaves them alone.", ge=0.0)
    seed: int = _key(0, "Seed of the weights and of the data order.", ge=0, lt=2**63)
    dtype: Literal["fp32", "bf16"] = _key("fp32", "Precision of the forward pass; bf16 keeps fp32 master weights.")
    moment_dtype: Literal["fp32", "bf16"] = _key(
        "fp32", "Precision in which AdamW's moments are kept; bf16 changes results a little."
    )
    master: Literal["fp32", "split"] = _key(
        "fp32",
        "How a bf16 run keeps its fp32 weights: whole, or as the bf16 weight and the 16 bits that it lacks, which are "
        "the same numbers in a third less memory.",
    )
    eval_every: int = _key(100, "Steps between held-out evaluations; 0 means only after the last step.", "steps", ge=0)
    eval_batches: int = _key(8, "Micro-batches in one evaluation; 0 means all of the held-out data.", ge=0)
    log_every: int = _key(1, "Steps between lines of metrics.jsonl.", "steps", ge=1)
    checkpoint_every: int = _key(500, "Steps between checkpoints; 0 means only after the last step.", "steps", ge=0)
    keep_checkpoints: int = _key(2, "Newest checkpoints that are kept; 0 keeps all.", "checkpoints", ge=0)
    threads: int = _key(
        0, "CPU threads; 0 takes OMP_NUM_THREADS if set, else one per physical core.", "threads", ge=0, le=1024
    )
    tune_malloc: bool = _key(True, "Have glibc keep freed blocks; false gives each back, less memory and slower.")
    mtp_weight: float = _key(
        0.3, "Weight of the loss of multi-token prediction blocks, where a model has them.", ge=0.0
    )

    @model_validator(mode="before")
    @classmethod
    def _short_runs_warm_up_shortly(cls, values: Any) -> Any:
        if isinstance(values, dict) and "warmup_steps" not in values:
            steps = values.get("steps", 1000)
            if isinstance(steps, int) and steps > 0:
                return values | {"warmup_steps": min(100, steps // 10)}
        return values


class BalanceTable(Table):
    """How experts are kept evenly loaded. Losses are per layer, and 1 at perfect balance."""

    batch_aux: float = _key(
        0.0,
        "Coefficient of the load-balancing loss over a micro-batch.",
        derived="the model's own when neither an auxiliary loss nor bias_update is given",
        ge=0.0,
    )
    sequence_aux: float = _key(0.0, "Coefficient of the load-balancing loss over each sequence.", ge=0.0)
    global_aux: float = _key(0.0, "Coefficient of the load-balancing loss over the counts of the whole step.", ge=0.0)
    z_loss: float = _key(0.0, "Coefficient of the mean squared log-sum-exp of the router's logits.", ge=0.0)
    bias_update: float = _key(0.0, "Step of the selection bias per optimizer step (aux-loss-free balancing).", ge=0.0)
    force: Literal["none", "even", "skew"] = _key(
        "none", "Benchmark only: choose experts evenly, or skewed by a random bias, instead of by the router."
    )
    force_std: float = _key(0.0, 'Standard deviation of the bias of `force = "skew"`, in logits.', ge=0.0)
    record: str | None = _key(None, "File to write the chosen experts of every step to.")
    replay: str | None = _key(None, "Benchmark only: file of recorded choices to use instead of the router's.")


class ClusterTable(Table):
    """The machines a run is planned for."""

    gpu: str | None = _key(None, "Name of the accelerator.")
    nodes: int | None = _key(None, "Number of machines.", "nodes", ge=1)
    gpus_per_node: int | None = _key(None, "Accelerators in one machine.", "accelerators", ge=1)


class RunTable(Table):
    """Where results go."""

    name: str = _key("run", "Name of the run in logs and reports.", derived="the run file's name", min_length=1)
    dir: str = _key(
        "runs/run", "Folder of metrics, checkpoints and the report.", derived="runs/ and the name", min_length=1
    )
    timeout_seconds: float = _key(
        600.0, "Longest wait for another rank before the job is taken down.", "seconds", gt=0.0
    )
    memory_steps: int = _key(
        0, "First steps whose memory is metered, by module and phase, into memory.json; they are slower.", "steps", ge=0
    )

    @model_validator(mode="before")
    @classmethod
    def _folder_of_that_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("name"), str) and "dir" not in values:
            return values | {"dir": f"runs/{values['name']}"}
        return values


TABLES: dict[str, type[Table]] = {
    "model": ModelTable,
    "data": DataTable,
    "layout": LayoutTable,
    "train": TrainTable,
    "balance": BalanceTable,
    "cluster": ClusterTable,
    "run": RunTable,
}
