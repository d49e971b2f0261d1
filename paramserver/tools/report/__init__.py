"""Reports of runs and benchmarks: cases, statistics, findings, tables, plots and pages. Imports nothing that trains."""
