"""Reports of studies: tables, pictures and sentences, all of them made from raw results."""
