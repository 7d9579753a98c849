"""Long looks at single promises: ``python -m tests.soak --help``. What they found stands in docs/field-cases.md."""
