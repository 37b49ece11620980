"""BERT (Devlin et al. 2019) and GPT-2: Transformer blocks preconditioned, embeddings not."""

from analysis.cost_model.models.layers import Layer, Model

_VOCABULARY, _POSITIONS, _SEGMENTS = 30522, 512, 2


def bert(name: str, depth: int, width: int, tokens: int) -> Model:
    """`depth` encoder layers of `width` features over `tokens`, with a question-answering head."""
    layers = []
    for block in range(depth):
        for part, inputs, outputs in (
            ("query", width, width),
            ("key", width, width),
            ("value", width, width),
            ("attention", width, width),
            ("intermediate", width, 4 * width),
            ("output", 4 * width, width),
        ):
            layers.append(_linear(f"layer.{block}.{part}", inputs, outputs, tokens))
    layers.append(_linear("qa_outputs", width, 2, tokens))
    embeddings = (_VOCABULARY + _POSITIONS + _SEGMENTS) * width
    norms = 2 * width * (1 + 2 * depth)
    attention = depth * 2 * 2 * tokens**2 * width  # scores and their product with the values
    return Model(name, tuple(layers), embeddings + norms, plain_flops=attention)


def masked_bert(depth: int, width: int, tokens: int, vocabulary: int) -> Model:
    """An encoder as in `bert`, with the head for masked words, tied to the word embedding and plain."""
    layers = []
    for block in range(depth):
        name = f"bert.encoder.layer.{block}"
        for part, inputs, outputs in (
            ("attention.self.query", width, width),
            ("attention.self.key", width, width),
            ("attention.self.value", width, width),
            ("attention.output.dense", width, width),
            ("intermediate.dense", width, 4 * width),
            ("output.dense", 4 * width, width),
        ):
            layers.append(_linear(f"{name}.{part}", inputs, outputs, tokens))
    embeddings = (vocabulary + tokens + _SEGMENTS) * width
    norms = 2 * width * (2 + 2 * depth)
    head = width * width + width + vocabulary
    flops = depth * 2 * 2 * tokens**2 * width + 2 * tokens * width * (width + vocabulary)
    return Model("bert", tuple(layers), embeddings + norms + head, plain_flops=flops)


def gpt(depth: int, width: int, tokens: int, vocabulary: int) -> Model:
    """GPT-2 (Radford et al. 2019) over sequences of `tokens`; its head is tied to the word embedding."""
    layers = []
    for block in range(depth):
        for part, inputs, outputs in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            layers.append(_linear(f"transformer.h.{block}.{part}", inputs, outputs, tokens))
    others = (vocabulary + tokens) * width + 2 * width * (1 + 2 * depth)
    flops = depth * 2 * 2 * tokens**2 * width + 2 * tokens * width * vocabulary
    return Model("gpt", tuple(layers), others, plain_flops=flops)


def _linear(name: str, inputs: int, outputs: int, tokens: int) -> Layer:
    return Layer(name, inputs, outputs, size=(1, tokens), bias=True, kind="linear")
