"""The modules of recurrent layers (GDN, KDA, Mamba) share one caller per kernel."""
