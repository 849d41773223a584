"""Plans in other tools' formats (torch's schedule CSV, Megatron's layout string, OctoPipe's YAML), and traces."""
