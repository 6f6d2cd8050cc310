"""The words that paths of models are made of, as tables: what each one is a sign of.

A word alone decides little here: `evidence`, `kinds` and `shapes` weigh it against the
neighbours and the shape of a parameter.
"""

import re

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
VECTOR |= {"var", "freqs", "freq", "cos", "sin", "probe", "mask", "tau", "decay", "dt"}
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
EMBEDDED |= {"position", "positions", "positional", "type", "vocab", "text", "image"}
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
POSITION |= {"relative"}

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

# Modules of attention. Each entry is a whole name in lower case without numbers, or its
# words joined by "_".
QUERY = {"q", "query", "wq", "q_proj", "query_proj", "to_q", "q_einsum", "wq_b", "q_b"}
QUERY |= {"q_b_proj", "q_up_proj", "wq_up", "queries"}
KEY_VALUE = {"k", "v", "key", "value", "wk", "wv", "k_proj", "v_proj", "key_proj"}
KEY_VALUE |= {"value_proj", "to_k", "to_v", "wkv_b", "kv_b", "kv_b_proj", "kv_einsum"}
KEY_VALUE |= {"k_einsum", "v_einsum", "kv", "wkv", "kv_proj", "to_kv", "wk_b", "wv_b"}
KEY_VALUE |= {"k_up_proj", "v_up_proj", "kv_up_proj", "keys", "values"}
FUSED = {"qkv", "qkv_proj", "wqkv", "to_qkv", "qkv_einsum", "c_attn", "query_key_value"}
FUSED |= {"in_proj_qkvz", "in_proj_qkv", "attn_qkv"}
FUSED_KEY_VALUE = {"kv", "wkv", "kv_proj", "kv_einsum", "to_kv"}
OUT = {"o", "out", "wo", "o_proj", "out_proj", "to_out", "attn_vec_einsum", "output"}
OUT |= {"output_proj", "attn_out", "o_einsum", "out_einsum", "wo_b", "o_b_proj", "o_b"}
OUT |= {"c_proj", "attn_vec"}
# The first of two factors of a projection: (embed, rank), or (heads, rank) for outputs.
FIRST_FACTOR = {"wq_a", "wkv_a", "q_a_proj", "kv_a_proj", "q_down_proj", "kv_down_proj"}
FIRST_FACTOR |= {"kv_a_proj_with_mqa"}
FIRST_FACTOR_OUT = {"wo_a", "o_a_proj"}

# Projections into and out of a wider or narrower space than the width of the model.
UP = {"wi", "up", "up_proj", "gate_proj", "gate", "c_fc", "fc_in", "intermediate"}
UP |= {"gating_einsum", "gate_up_proj", "gate_up", "weights_proj"}
UP |= {"w_up", "w_gate", "wi_up", "wi_gate", "proj_up", "ffw_up", "ffw_gate", "w_in"}
UP |= {
    "in_proj",
    "linear_in",
    "mlp_in",
    "up_einsum",
    "gate_einsum",
    "input_linear",
}
DOWN = {"down", "down_proj", "fc_out", "w_down", "proj_down", "ffw_down", "w_out"}
DOWN |= {"linear_out", "mlp_out", "out_proj", "down_einsum", "wo"}
DOWN |= {"c_proj", "per_layer_projection", "output_linear"}

# A path of a factor of LoRA, the first or the second: `lora_a`, or `lora/a`.
LORA_FACTOR = re.compile(r"(.*lora[_/])([abAB])\b(.*)")
OTHER_FACTOR = {"a": "b", "b": "a", "A": "B", "B": "A"}
