"""The words that the paths of models are made of. Data only.

A word alone decides little: the rules weigh it against the neighbours and the shape of
a parameter. Words cost nothing and help with models that nobody has tried yet.
"""

import re


def _words(text: str) -> set[str]:
    return set(text.split())


# --- labels ---------------------------------------------------------------------------

# Roles that go to AdamW; every other role is a matrix and goes to Muon.
NOT_MATRICES = {"embedding", "head", "norm", "bias", "vector", "router", "depthwise"}

# --- names of leaves ------------------------------------------------------------------

# These say only that a leaf is what its module multiplies by.
GENERIC = _words("kernel weight weights w weight_v weight_ih weight_hh")
BIAS = _words("bias biases b offset offsets")
# Attributes of wrappers around one array: of haliax, penzai, paramax.
BOXES = _words("array data_array args")
SCALE = _words("scale scales gain gains gamma g")
# Leaves that are vectors, stacked or not: scalars of a model, buffers, and arrays used
# like activations, such as class tokens.
VECTOR = _words(
    """
    beta alpha lambda lambdas scalar scalars token tokens slope slopes sink sinks
    temperature variance var mean eps tau decay dt mask masks probe cos sin freq freqs
    gaussian fourier latents register registers prompt prompts slots inducing
    scale scales gain gains gamma bias biases offset offsets
    """
)
# Whole names of leaves, of state-space models, RWKV and weight normalization.
STATE_SPACE = _words(
    """
    a_log log_a a_logs dt_bias a_real a_imag log_a_real time_first time_faaaa weight_g
    """
)
TABLE = _words("embedding embeddings input_embedding input_embeddings token_embeddings")

# --- names of modules -----------------------------------------------------------------

# Containers say nothing of their contents.
CONTAINERS = _words(
    """
    params layer layers block blocks module modules sequential list net nets stack
    stacked layer_instance lora inner base features
    """
)
# Containers whose leaves have a leading axis of layers, if all of them share one.
STACKS = _words("layers blocks stacked stack scan scanned h")
# Modules that say nothing: the module above them is asked.
PLAIN = _words("dense linear einsum fc proj projection densegeneral")

NORM = _words(
    """
    norm norms layernorm rmsnorm batchnorm groupnorm ln bn gn rms normalization
    normalisation layrnorm
    """
)
ADAPTIVE = {"ada", "adaptive"}

EMBEDDING = _words(
    """
    embed embeds embedding embeddings embedder emb embs wte wpe codebook codebooks
    codevectors
    """
)
# An `embedding` of these kinds is a projection that is called so.
EMBEDDED = _words(
    """
    patch token tokens tok word input inputs pos class label position positions
    positional type vocab text image linear
    """
)
TIME = {"time", "timestep"}
# After these words an embedding's name means a projection of it.
PROJECTION = _words("proj projection project linear dense mapping in out")
POSITION = _words(
    """
    pos position positions positional relpos abspos rel relative encoding encodings
    posemb posembed
    """
)

HEAD = _words(
    """
    logit logits readout lmhead classifier unembed unembedding unembedder logitdense
    logitsdense
    """
)
# Heads by their last word: `head_mixer` is not one, nor is `multi_head`.
HEAD_LAST = {"head", "heads"} | HEAD
NO_HEAD = {"pre", "multi"}
# Names of heads at the top of a model, outside its layers.
WEAK_HEADS = _words(
    """
    fc output_layer output_proj prediction predictions qa_outputs seq_relationship
    to_logits final_layer output_dense final_dense out_layer dense_out
    """
)
# Names of heads, if they are modules of the model itself and not of a part of it.
OUTERMOST_HEADS = _words(
    """
    linear output outputs score scores value policy decoder final
    """
)
# The leaves of a head that is a small network: the last one gives the outputs.
HEAD_PARTS = _words(
    """
    layer layers dense linear out proj output decoder fc mlp final logits conv convs in
    hidden lm
    """
)
HEAD_ENDS = _words("out output decoder logits final")
# Inside these modules nothing is a head by a weak name.
INSIDE = _words("layer layers block blocks attention mlp")

ROUTER = {"router", "routers"}
GATE = {"gate", "gating"}
EXPERTS = {"expert", "experts", "moe"}
# Modules whose kernels belong to experts.
EXPERT_MODULES = {"moe", "moe_block", "moe_mlp", "sparse_moe"}

CONVOLUTION = _words(
    """
    conv convs convolution convolutional deconv convtranspose patchify downsampler
    downsamplers upsampler upsamplers
    """
)
DEPTHWISE = {"depthwise", "dwconv"}
GROUPED = _words("group grouped groups dw")

# --- projections of attention and MLPs ------------------------------------------------

# The second of two factors of a query, (rank, heads).
SECOND_FACTOR = {"q_b", "q_up"}
# (heads, rank), the first factor of an output projection.
FIRST_FACTOR_OUT = {"o_a"}
# Into and out of a wider or narrower space than the width of the model.
UP = _words(
    """
    i up gate gating gate_up up_gate i_up i_gate weights c_fc fc_in in input
    intermediate
    """
)
DOWN = _words("down fc_out per_layer")
# The layers of an MLP by their number, such as `fc1` and `linear1_0`.
NUMBERED = re.compile(r"(?:linear|dense|fc|w)_?([12])(?:_\d+)?")

# A path of a factor of LoRA, the first or the second: `lora_a`, or `lora/a`.
LORA_FACTOR = re.compile(r"(.*lora[_/])([abAB])\b(.*)")
OTHER_FACTOR = {"a": "b", "b": "a", "A": "B", "B": "A"}
