;; Says who it is and is nothing.
;;! world export querl:plugin/info@0.1.0;
(module
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
)
