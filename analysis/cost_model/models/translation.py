"""The Transformer of Vaswani et al. 2017; its attention has no biases, and its head is tied."""

from analysis.cost_model.models.layers import Layer, Model


def transformer(layers: int, hidden: int, feed_forward: int, vocabulary: int, tokens: int) -> Model:
    """`layers` in encoder and in decoder, over `tokens` of each side; embeddings and head are plain."""
    found: list[Layer] = []
    for block in range(layers):
        found += _block(f"encoder.{block}", ("attention",), hidden, feed_forward, tokens)
    for block in range(layers):
        found += _block(
            f"decoder.{block}", ("self_attention", "cross_attention"), hidden, feed_forward, tokens
        )
    norms = 2 * hidden * 5 * layers  # two of an encoder's layer, three of a decoder's
    attention = 3 * layers * 2 * 2 * tokens**2 * hidden  # scores and their product with the values
    head = 2 * tokens * hidden * vocabulary
    return Model("transformer", tuple(found), 2 * vocabulary * hidden + norms, plain_flops=attention + head)


def _block(
    name: str, attentions: tuple[str, ...], hidden: int, feed_forward: int, tokens: int
) -> list[Layer]:
    size = (1, tokens)
    return [
        *(
            Layer(f"{name}.{attention}.{part}", hidden, hidden, size=size, kind="linear")
            for attention in attentions
            for part in ("query", "key", "value", "out")
        ),
        Layer(f"{name}.feed_forward.0", hidden, feed_forward, size=size, bias=True, kind="linear"),
        Layer(f"{name}.feed_forward.3", feed_forward, hidden, size=size, bias=True, kind="linear"),
    ]
