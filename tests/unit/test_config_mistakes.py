"""Every kind of mistake in a configuration ends in one message that names the field, the value and the remedy."""

from __future__ import annotations

import pytest

from nemo_qad import command_line, train

MISTAKES: list[tuple[list[str], list[str]]] = [
    (["recipe=maxx"], ["recipe=maxx", "Did you mean max?", "four_over_six"]),
    (["qad.lerning_rate=1e-5"], ["qad.lerning_rate=1e-5", "Did you mean qad.learning_rate?"]),
    (["qda.steps=3"], ["qda.steps", "Did you mean qad.steps?"]),
    (["steps=3"], ["steps=3", "qad.steps", "teacher.steps"]),
    (["+typo=1"], ["typo=1", "no such setting"]),
    (["++qad.typo=1"], ["qad.typo=1", "no such setting"]),
    (["+qad.steps=20"], ["+qad.steps", "without the plus"]),
    (["+model=tiny_hybrid"], ["+model", "without the plus"]),
    (["model=tiny"], ["model=tiny", "Choices", "tiny_hybrid"]),
    (["qad.steps=many"], ["qad.steps=many", "whole number"]),
    (["qad.steps=1.5"], ["qad.steps=1.5", "whole number"]),
    (["qad.learning_rate=fast"], ["qad.learning_rate=fast", "a number"]),
    (["qad.steps=null"], ["qad.steps=null", "whole number"]),
    (["qad=3"], ["qad=3", "published_32k"]),
    (["deterministic=perhaps"], ["deterministic=perhaps", "true or false"]),
    (["model.precision=fp16"], ["model.precision=fp16", "bf16", "fp32"]),
    (["recipe.mamba=fp4"], ["recipe.mamba=fp4", "nvfp4"]),
    (["stages=[train]"], ["stages=train", "teacher", "report"]),
    (["stages=[]"], ["stages=[]", "at least one"]),
    (["stages=[ptq,ptq]"], ["stages=ptq", "twice"]),
    (["stages=ptq"], ["stages=ptq", "a list such as"]),
    (["stages=[logits]"], ["stages=[logits]", "nothing to do", "qad.loss=linear_kl", "qad.loss=top_k"]),
    (["qad.loss=topk"], ["qad.loss=topk", "top_k", "linear_kl"]),
    (["qad.loss=modelopt", "qad.reverse=true"], ["qad.reverse=true", "qad.loss=modelopt", "qad.loss=kl"]),
    (["qad.loss=top_k", "qad.reverse=true"], ["qad.reverse=true", "qad.loss=top_k", "qad.loss=kl"]),
    (["qad.loss=top_k", "qad.sparse_values=4097"], ["qad.sparse_values=4097", "model.vocab_size=4096"]),
    (["qad.loss=sampled", "qad.sparse_values=4097"], ["qad.sparse_values=4097", "model.vocab_size=4096"]),
    (["qad.sparse_values=0"], ["qad.sparse_values=0", "at least 1"]),
    (["qad.loss_memory_mib=0"], ["qad.loss_memory_mib=0", "at least 1"]),
    (["qad.teacher_logits=/tmp"], ["qad.teacher_logits=/tmp", "qad.loss=linear_kl", "qad.loss=sampled"]),
    (["qad.loss=top_k", "qad.teacher_logits=''"], ["qad.teacher_logits=''", "leave it out"]),
    (["qad.loss=top_k", "qad.teacher_logits=/nowhere"], ["qad.teacher_logits=/nowhere", "no such folder"]),
    (["qad.steps=20,30"], ["qad.steps=20,30", "Add -m"]),
    (["qad.steps=[1,2"], ["qad.steps=[1,2", "quote"]),
    (["qad.steps"], ["qad.steps", "NAME=VALUE"]),
    (["~qad"], ["qad=", "published_32k"]),
    (["--recipe", "max"], ["--recipe", "+recipe=VALUE"]),
    (["--multrun"], ["--multrun", "Did you mean --multirun?"]),
    (["--config-name=other"], ["--config-name", "--config-dir"]),
    (["--config-dir=/nowhere"], ["--config-dir=/nowhere", "no such folder"]),
    (["hydra/launcher=nowhere"], ["hydra/launcher=nowhere", "--help"]),
    (["qad.steps=0"], ["qad.steps=0", "at least 1"]),
    (["seed=-1"], ["seed=-1", "at least 0"]),
    (["seed=99999999999"], ["seed=99999999999", "at most"]),
    (["qad.learning_rate=-1e-5"], ["qad.learning_rate", "above 0"]),
    (["qad.learning_rate=nan"], ["qad.learning_rate=nan", "finite"]),
    (["qad.temperature=0"], ["qad.temperature", "above 0"]),
    (["qad.warmup_steps=160"], ["qad.warmup_steps=160", "qad.steps=160"]),
    (["teacher.warmup_steps=1000"], ["teacher.warmup_steps=1000", "teacher.steps=1000"]),
    (["qad.min_learning_rate=1"], ["qad.min_learning_rate=1", "qad.learning_rate"]),
    (["qad.average_decay=1"], ["qad.average_decay=1", "[0, 1)"]),
    (["data.held_out_fraction=0"], ["data.held_out_fraction=0", "(0, 1)"]),
    (["evaluation.band_low=0.995"], ["evaluation.band_low=0.995", "band_high=0.99"]),
    (["qad.global_batch_size=20"], ["qad.global_batch_size=20", "Give 32"]),
    (["qad.sequence_length=1024"], ["qad.sequence_length=1024", "max_position_embeddings=512"]),
    (["evaluation.sequence_length=1024"], ["evaluation.sequence_length=1024", "512"]),
    (["teacher.sequence_length=1024"], ["teacher.sequence_length=1024", "512"]),
    (["calibration.sequence_length=1024"], ["calibration.sequence_length=1024", "512"]),
    (["model.hybrid_pattern=MX"], ["model.hybrid_pattern=MX", "'X'", "Mamba-2"]),
    (["model.hybrid_pattern=''"], ["model.hybrid_pattern=", "no layers"]),
    (["model.mtp_num_layers=1"], ["model.mtp_num_layers=1", "mtp_pattern"]),
    (["model.attention.num_heads=5"], ["model.attention.num_heads=5", "Try 4 or 6"]),
    (["model.mamba.num_heads=5"], ["model.mamba.num_heads=5", "Try 4 or 6"]),
    (["model.moe.top_k=9"], ["model.moe.top_k=9", "num_experts=8"]),
    (["model.vocab_size=100"], ["model.vocab_size=100", "512"]),
    (["model.hidden_size=120"], ["model.hidden_size=120", "nvfp4", "multiple of 16"]),
    (["model.moe.ffn_hidden_size=100"], ["model.moe.ffn_hidden_size=100", "routed_experts=bf16"]),
    (
        ["model.moe.ffn_hidden_size=1856", "parallel.nodes=8", "parallel.expert_tensor=8"],
        ["model.moe.ffn_hidden_size=1856", "a rank has 232", "fewer tensor-parallel ranks"],
    ),
    (["model.moe.shared_expert_ffn_hidden_size=8"], ["_ffn_hidden_size=8", "shared_experts=bf16"]),
    (["model.mamba.head_dim=31"], ["model.mamba.head_dim=31", "recipe.mamba=bf16"]),
    (["model.tied_output=true"], ["recipe.output_layer=nvfp4", "recipe.output_layer=bf16"]),
    (["recipe.kv_cache=nvfp4", "model.attention.head_dim=24"], ["head_dim=24", "recipe.kv_cache=fp8"]),
    (["recipe.scale_search=mse"], ["recipe.scale_search=mse", "recipe.weight_scales=static"]),
    (["recipe.qad_scales=frozen"], ["recipe.qad_scales=frozen", "recipe.weight_scales=static"]),
    (["recipe.weight_scales=static"], ["recipe.qad_scales=dynamic", "recipe.qad_scales=frozen"]),
    (["recipe.scale_search=mse_256"], ["recipe.scale_search=mse_256", "recipe.weight_scales=static"]),
    (["calibration.error=hessian"], ["calibration.error=hessian", "calibration.error=squared"]),
    (["calibration.idle_experts=ignore"], ["calibration.idle_experts", "all_tokens"]),
    (["qad.clip_weights=true"], ["qad.clip_weights=true", "frozen scales"]),
    (["qad.refresh_scales_every=20"], ["qad.refresh_scales_every=20", "frozen scales"]),
    (["qad.refresh_scales_every=-1"], ["qad.refresh_scales_every=-1", "at least 0"]),
    (
        ["+recipe=mse", "calibration.error=hessian", "qad.refresh_scales_every=20"],
        ["qad.refresh_scales_every=20", "calibration.error=squared"],
    ),
    (["recipe.name=a/b"], ["recipe.name=a/b", "folder name"]),
    (["data=indexed"], ["data.path=None", "data.path=FOLDER"]),
    (["data=indexed", "data.path=/nowhere"], ["data.path=/nowhere", "no such folder"]),
    (["teacher.path=/nowhere"], ["teacher.path=/nowhere", "no such folder"]),
    (["model=nemotron_3_nano_30b_a3b"], ["teacher.path=None", "teacher.path=FOLDER"]),
    (["parallel.tensor=2"], ["parallel.tensor=2", "does not divide the 1 ranks"]),
    (["parallel.nodes=4", "parallel.tensor=4"], ["parallel.tensor=4", "model.mamba.num_groups (2)", "1, 2"]),
    (["parallel.nodes=3", "parallel.pipeline=3"], ["parallel.pipeline=3", "hybrid_pattern (5)", "1, 5"]),
    (["parallel.nodes=3", "parallel.expert=3"], ["parallel.expert=3", "1, 2, 4, 8"]),
    (["parallel.nodes=2", "parallel.context=2", "qad.sequence_length=126"], ["length=126", "Give 128"]),
    (["-m", "qad.steps=5,20"], ["qad.warmup_steps=10", "qad.steps=5"]),
    (["-m", "recipe=max,mxe"], ["recipe=mxe", "Choices"]),
    (["-m", "seed=1,1"], ["run_dir=", "two jobs"]),
    (["-m", "seed=1,2", "run_dir=same"], ["run_dir=", "two jobs"]),
]


@pytest.mark.parametrize(("overrides", "words"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_each_mistake_has_its_message(
    overrides: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def started(command: command_line.Command) -> int:
        raise AssertionError("the mistake was not noticed")

    monkeypatch.setattr(train, "_run", started)
    given = overrides if any("recipe=" in o for o in overrides) else ["+recipe=max", *overrides]
    assert train.main(given) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert [word for word in words if word not in message] == [], message
    assert "Traceback" not in message
