//! Tests of the workspace's own rules, in `tests/`. Tests of the command line are beside the binary, in `host/querl/tests/`.
