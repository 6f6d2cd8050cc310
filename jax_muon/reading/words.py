"""The words that paths of models are made of, as tables: what each one is a sign of.

A word alone decides little here: `evidence`, `kinds` and `shapes` weigh it against the
neighbours and the shape of a parameter.
"""

import re

from jax_muon import paths

# Names that say only that a leaf is what its module multiplies by.
GENERIC = {"kernel", "weight", "weights", "w", "weight_v", "weight_ih", "weight_hh"}
# Names of leaves that are vectors, possibly stacked, as single words.
BIAS = {"bias", "biases", "b", "offset", "offsets"}
SCALE = {"scale", "scales", "gain", "gains", "gamma", "g"}
VECTOR = {"beta", "alpha", "lambda", "lambdas", "scalar", "scalars", "token", "tokens"}
VECTOR |= {"slope", "slopes", "sink", "sinks", "temperature", "variance", "eps", "mean"}
VECTOR |= {"gaussian", "fourier"}  # buffers of random projections
# Arrays that stand among a model's activations, as class tokens do.
VECTOR |= {"latents", "registers", "register", "prompt", "prompts", "slots", "inducing"}
VECTOR |= {
    "var",
    "freqs",
    "freq",
    "cos",
    "sin",
    "probe",
    "mask",
    "masks",
    "tau",
    "decay",
    "dt",
}
# Whole names of leaves that are not matrices of any rank: state-space models, buffers.
STATE_SPACE = {"a_log", "log_a", "a_logs", "dt_bias", "a_real", "a_imag", "log_a_real"}
STATE_SPACE |= {"time_first", "time_faaaa"}  # of RWKV, (heads, head_dim)

# Containers: components that say nothing of what is in them.
CONTAINERS = {"params", "~", "layers", "layer", "blocks", "block", "modules", "module"}
CONTAINERS |= {
    "sequential",
    "list",
    "stacked",
    "stack",
    "net",
    "nets",
    "layer_instance",
}
CONTAINERS |= {"lora", "inner", "base", "features"}
# Containers whose leaves have a leading axis of layers, if all of them share one.
STACKS = {"layers", "blocks", "stacked", "stack", "scan", "scanned", "h"}
# Modules that say nothing: the module above them is asked.
PLAIN = {"dense", "linear", "einsum", "fc", "proj", "projection", "densegeneral"}

NORM = {"norm", "layernorm", "rmsnorm", "batchnorm", "groupnorm", "ln", "bn", "gn"}
NORM |= {"normalization", "layrnorm", "normalisation", "rms", "norms"}
ADAPTIVE = {"ada", "adaptive"}

EMBEDDING = {"embed", "embeds", "embedding", "embeddings", "embedder", "emb", "wte"}
EMBEDDING |= {"wpe", "codebook", "codebooks", "codevectors", "embs"}
# An `embedding` of these kinds is a projection that is called so.
EMBEDDED = {"patch", "token", "tokens", "tok", "word", "input", "inputs", "pos"}
EMBEDDED |= {
    "class",
    "label",
    "position",
    "positions",
    "positional",
    "type",
    "vocab",
    "text",
    "image",
}
# Words behind which an embedding's name is that of a projection of it.
PROJECTION = {
    "proj",
    "projection",
    "linear",
    "dense",
    "mapping",
    "in",
    "out",
    "project",
}
POSITION = {"pos", "position", "positions", "positional", "relpos", "abspos", "rel"}
POSITION |= {"relative", "encoding", "encodings", "posemb", "posembed"}

HEAD = {"logit", "logits", "readout", "lmhead", "classifier", "unembed", "unembedding"}
HEAD |= {"unembedder", "logitdense", "logitsdense"}
# Heads by their last word: `head_mixer` is not one.
HEAD_LAST = {"head", "heads"} | HEAD
# Names of heads, if they stand at the top of a model, outside its layers.
WEAK_HEADS = {"fc", "output_layer", "output_proj", "prediction", "predictions"}
WEAK_HEADS |= {"qa_outputs", "seq_relationship", "to_logits", "final_layer"}
WEAK_HEADS |= {"output_dense", "final_dense", "out_layer", "dense_out"}
# Names of heads, if they are modules of the model itself and not of a part of it.
OUTERMOST_HEADS = {"linear", "output", "outputs", "score", "scores", "value", "policy"}
OUTERMOST_HEADS |= {"decoder", "final"}
# The leaves of a head that is a small network: the last one gives the outputs.
HEAD_PARTS = {"layers", "layer", "dense", "linear", "out", "proj", "output", "decoder"}
HEAD_PARTS |= {"fc", "mlp", "final", "logits", "conv", "convs", "in", "hidden"}
HEAD_ENDS = {"out", "output", "decoder", "logits", "final"}

ROUTER = {"router", "routers"}
GATE = {"gate", "gating"}
EXPERTS = {"expert", "experts", "moe"}

CONVOLUTION = {
    "conv",
    "convs",
    "convolution",
    "convolutional",
    "deconv",
    "convtranspose",
}
CONVOLUTION |= {"downsampler", "downsamplers", "upsampler", "upsamplers", "patchify"}
TRANSPOSED = {"transpose", "transposed", "deconv", "convtranspose"}
DEPTHWISE = {"depthwise", "dwconv"}
GROUPED = {"group", "grouped", "groups", "dw"}

# Projections of attention and MLPs by their `core`, which leaves out the words around:
# `q`, not `q_proj`, `to_q` or `wq`.
ATTENTION = {"attn", "attention"}
AROUND = ATTENTION | {"self", "cross", "proj", "projection", "einsum", "to", "w"}
AROUND |= {"linear", "mlp", "ffw"}
QUERY = {"q", "query", "queries", "q_b", "q_up"}
KEY_VALUE = {"k", "v", "key", "value", "keys", "values", "kv"}
KEY_VALUE |= {"kv_b", "k_b", "v_b", "k_up", "v_up", "kv_up"}
FUSED = {"qkv", "query_key_value", "in_qkvz", "in_qkv"}
OUT = {"o", "out", "output", "vec", "o_b"}
# The first of two factors of a projection: (embed, rank), or (heads, rank) for outputs.
FIRST_FACTOR = {"q_a", "kv_a", "q_down", "kv_down", "kv_a_with_mqa"}
FIRST_FACTOR_OUT = {"o_a"}
# Into and out of a wider or narrower space than the width of the model.
UP = {"i", "up", "gate", "gating", "gate_up", "up_gate", "i_up", "i_gate", "weights"}
UP |= {"c_fc", "fc_in", "in", "input", "intermediate"}
DOWN = {"down", "fc_out", "per_layer"}


def core(name: str) -> str:
    """The words of a name but for those around the name of a projection.

    Examples:
      >>> core("q_proj"), core("to_kv"), core("attention_output"), core("wo")
      ('q', 'kv', 'output', 'o')
    """
    found = [_W.sub("", word) for word in paths.words(name)]
    named = {"c_attn": "qkv", "c_proj": "out"}.get("_".join(found))  # of GPT-2
    return named or "_".join(word for word in found if word not in AROUND)


_W = re.compile("^w(?=(q|k|v|kv|qkv|o|i)$)")

# A path of a factor of LoRA, the first or the second: `lora_a`, or `lora/a`.
LORA_FACTOR = re.compile(r"(.*lora[_/])([abAB])\b(.*)")
OTHER_FACTOR = {"a": "b", "b": "a", "A": "B", "B": "A"}
