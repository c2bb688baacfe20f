"""CDK application: the stack of the stage in the context. The CDK command line runs this module."""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    # The command line reports Ctrl-C. The imports take seconds and would print a traceback, so this line precedes them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from aws_cdk import App, Validations
from cdk_nag import AwsSolutionsChecks

from cdk.stack import BatonStack
from cdk.stage import SETTINGS, StageSettings, StageSettingsError


def build(app: App) -> BatonStack:
    """Build the stack with the checks of cdk-nag. Raises StageSettingsError for an invalid setting."""
    stage = StageSettings.from_context({name: app.node.try_get_context(name) for name in ("stage", *SETTINGS)})
    stack = BatonStack(app, f"baton-{stage.name}", stage=stage)
    Validations.of(app).add_plugins(AwsSolutionsChecks(app))
    return stack


def main() -> int:
    """Synthesize the template into the folder given by the command line."""
    app = App()
    try:
        build(app)
    except StageSettingsError as error:
        sys.stderr.write(f"baton: {error}\n")
        return 2
    app.synth()
    return 0


if __name__ == "__main__":
    sys.exit(main())
