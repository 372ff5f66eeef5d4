"""Where logs come from: files, data frames, Spark."""
