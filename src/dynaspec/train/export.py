"""Checkpoints in the Hugging Face layout, put in place only when complete and loadable."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from dynaspec.contract.errors import CheckpointError

from .data import END_OF_TEXT_ID, copy_tokenizer, load_tokenizer

GENERATION = {
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": END_OF_TEXT_ID,
    "pad_token_id": END_OF_TEXT_ID,
    "do_sample": False,
}


def export(model: LlamaForCausalLM, tokenizer_folder: Path, folder: Path) -> None:
    """Write ``model`` in bfloat16 with its tokenizer to ``folder``, replacing what is there.

    Raises:
        CheckpointError: what was written does not load, or gives other logits.
    """
    staged = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        round_weights(model).to(torch.bfloat16).save_pretrained(staged)
        (staged / "model.safetensors").chmod(0o644)  # it is written for its owner alone
        _add_old_names(staged / "config.json", model.config.rope_parameters["rope_theta"])
        (staged / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n", "utf-8")
        copy_tokenizer(tokenizer_folder, staged)
        if (folder / "README.md").is_file():
            shutil.copy2(folder / "README.md", staged / "README.md")
        check(staged, round_weights(model), load_tokenizer(tokenizer_folder))
        _put_in_place(staged, folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def round_weights(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A float32 copy with the bfloat16 values that an export holds: the model people will run."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        # Weights alone: casting the module would round its rotary frequencies too.
        for parameter in copy.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return copy.eval()


def check(folder: Path, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Load ``folder`` as a user would and compare it with ``model`` and ``tokenizer``.

    Raises:
        CheckpointError: they differ.
    """
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = "def größe(x):\n    return 12 * x  # \u2603\n"
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False, return_tensors="pt").input_ids
    if ids[0].tolist() != tokenizer.encode(text, add_special_tokens=False).ids:
        raise CheckpointError(f"export: the tokenizer in {str(folder)!r} differs from training's")
    with torch.no_grad():
        difference = float((loaded(ids).logits - model(ids).logits).abs().max())
    if difference > 1e-4:
        raise CheckpointError(
            f"export: logits of {str(folder)!r} differ by {difference:.3g} from the model's, expected none"
        )


def load_exported(folder: Path, device: torch.device) -> LlamaForCausalLM:
    """An exported model, or a given target, in float32 on ``device``.

    Raises:
        CheckpointError: there is none.
    """
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"export: {str(folder)!r} holds no model, expected what the stage 'export' writes")
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def _add_old_names(path: Path, rope_theta: float) -> None:
    # Readers older than Transformers 5 look for these at the top level.
    settings = json.loads(path.read_text("utf-8"))
    settings |= {"rope_theta": rope_theta, "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", "utf-8")


def _put_in_place(staged: Path, folder: Path) -> None:
    retired = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        os.replace(folder, retired)
    os.replace(staged, folder)
    shutil.rmtree(retired, ignore_errors=True)
