"""What the CDK command line runs: the stack of the stage that the context names."""

from __future__ import annotations

import signal
import sys
from dataclasses import fields

if __name__ == "__main__":
    # Ctrl-C is the command line's to answer. Before the imports: they take seconds, and would answer with a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from aws_cdk import App, Validations
from cdk_nag import AwsSolutionsChecks

from cdk.stack import BatonStack
from cdk.stage import Stage, StageError


def build(app: App) -> BatonStack:
    """The stack, checked by cdk-nag. Raises StageError for a setting that is wrong."""
    names = ["stage", *(field.name for field in fields(Stage) if field.name != "name")]
    stage = Stage.from_context({name: app.node.try_get_context(name) for name in names})
    stack = BatonStack(app, f"baton-{stage.name}", stage=stage)
    Validations.of(app).add_plugins(AwsSolutionsChecks(app))
    return stack


def main() -> int:
    """Synthesise into the place that the command line names."""
    app = App()
    try:
        build(app)
    except StageError as error:
        sys.stderr.write(f"baton: {error}\n")
        return 2
    app.synth()
    return 0


if __name__ == "__main__":
    sys.exit(main())
