"""Commands of `esper`: plain dataclasses whose fields are options; work is imported when run."""
