"""Where logs come from: files, data frames, URLs, Spark."""
