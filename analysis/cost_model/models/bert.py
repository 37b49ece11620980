"""BERT (Devlin et al. 2019) with a question-answering head: encoder layers preconditioned, embeddings not."""

from analysis.cost_model.models.layers import Layer, Model

_VOCABULARY, _POSITIONS, _SEGMENTS = 30522, 512, 2


def bert(name: str, depth: int, width: int, tokens: int) -> Model:
    """`depth` encoder layers of `width` features over sequences of `tokens`; K-FAC skips the embeddings."""
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


def _linear(name: str, inputs: int, outputs: int, tokens: int) -> Layer:
    return Layer(name, inputs, outputs, size=(1, tokens), bias=True, kind="linear")
