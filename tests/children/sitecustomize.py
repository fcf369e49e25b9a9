"""What Python imports at its start in a process that a test has started."""

import outside

outside.install()
