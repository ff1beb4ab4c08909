;; Exports name and version, but no kind of plugin.
;;! world export querl:plugin/info@0.1.0;
(module
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
)
