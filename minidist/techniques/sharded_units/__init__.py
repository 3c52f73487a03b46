"""--prefetch, --reshard-after-forward, --persistence-threshold: when the units of ZeRO 3 are whole."""
