"""An extension of a user: every gradient is halved before the update."""

from minidist.techniques import Extension, Rule


class Halved(Extension):
    """Changes the training, so that the reference on one device halves them, too."""

    rules = (
        Rule(
            "halved-in-an-asynchronous-pipeline",
            lambda j: j.asynchronous,
            "--extension halves the gradients of a step, and with --schedule {schedule} no moment has them",
            "use a synchronous one, such as 1f1b",
        ),
    )

    def after_backward(self, strategy, step):
        for gradient in strategy.gradients():
            gradient *= 0.5
